//! Segments within one process, mapped twice.

use super::*;
use std::fs::File;

const PAGE: usize = 4096;
const GIB: usize = 1 << 30;

fn adopt_copy(segment: &Segment) -> Segment {
    Segment::adopt(segment.fd().unwrap().try_clone_to_owned().unwrap()).unwrap()
}

fn write(segment: &Segment, offset: usize, value: u8) {
    assert!(offset < segment.bytes());
    // SAFETY: the byte is within the mapping, and the tests here take turns.
    unsafe { segment.base().add(offset).write_volatile(value) }
}

fn read(segment: &Segment, offset: usize) -> u8 {
    assert!(offset < segment.bytes());
    // SAFETY: as in `write`.
    unsafe { segment.base().add(offset).read_volatile() }
}

/// The memory it costs.
fn resident(segment: &Segment) -> usize {
    rustix::fs::fstat(segment.fd().unwrap()).unwrap().st_blocks as usize * 512
}

/// The flags of the mapping at `segment`, as /proc has them.
fn mapping_flags(segment: &Segment) -> String {
    let start = format!("{:x}-", segment.base() as usize);
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
    lines.find(|line| line.starts_with("VmFlags:")).unwrap().to_string() + " "
}

#[test]
fn both_ends_see_what_either_writes() {
    let own = Segment::create("test", PAGE + 1).unwrap();
    assert_eq!(own.bytes(), own.bytes().next_multiple_of(PAGE));
    let theirs = adopt_copy(&own);
    assert_eq!(theirs.bytes(), own.bytes());
    assert_ne!(theirs.base(), own.base());
    write(&own, 7, 70);
    write(&theirs, PAGE, 80);
    assert_eq!((read(&theirs, 7), read(&own, PAGE)), (70, 80));
    drop(own);
    assert_eq!(read(&theirs, 7), 70);
}

#[test]
fn nobody_can_resize_it() {
    let own = Segment::create("test", PAGE).unwrap();
    for bytes in [0, 2 * PAGE as u64] {
        assert_eq!(rustix::fs::ftruncate(own.fd().unwrap(), bytes), Err(Errno::PERM));
    }
    let more = rustix::fs::fcntl_add_seals(own.fd().unwrap(), SealFlags::FUTURE_WRITE);
    assert_eq!(more, Err(Errno::PERM));
}

#[test]
fn what_could_be_resized_is_refused() {
    let unsealed = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&unsealed, PAGE as u64).unwrap();
    let half_sealed = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::fcntl_add_seals(&half_sealed, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    let file = File::open("/proc/self/exe").unwrap();
    let (pipe, _other_end) = std::io::pipe().unwrap();
    for refused in [unsealed, half_sealed, file.into(), pipe.into()] {
        let error = Segment::adopt(refused).unwrap_err().to_string();
        assert!(error.contains("the descriptor is not a memfd"), "{error}");
    }
}

#[test]
fn no_bytes_or_too_many_are_refused() {
    for bytes in [0, usize::MAX, usize::MAX / 2] {
        Segment::create("test", bytes).unwrap_err();
    }
    let empty = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::fcntl_add_seals(&empty, SIZE_SEALS).unwrap();
    Segment::adopt(empty).unwrap_err();
}

#[test]
fn only_touched_pages_cost_memory_and_released_ones_do_not() {
    let own = Segment::create("test", 64 * GIB).unwrap();
    let theirs = adopt_copy(&own);
    assert_eq!((own.bytes(), resident(&own)), (64 * GIB, 0));
    for page in 0..10 {
        write(&own, 50 * GIB + page * PAGE, 1);
    }
    write(&own, 64 * GIB - 1, 1);
    let cost = resident(&own);
    assert!((11 * PAGE..GIB).contains(&cost), "{cost}");
    own.release(50 * GIB, GIB).unwrap();
    assert!(resident(&own) <= cost - 10 * PAGE, "{} of {cost}", resident(&own));
    assert_eq!((read(&own, 50 * GIB), read(&theirs, 50 * GIB)), (0, 0));
    assert_eq!(read(&theirs, 64 * GIB - 1), 1);
    // Only its creator can give pages back.
    theirs.release(0, 64 * GIB).unwrap();
    assert_eq!(read(&own, 64 * GIB - 1), 1);
    own.release(0, 64 * GIB).unwrap();
    assert_eq!(resident(&own), 0);
    assert_eq!(read(&own, 64 * GIB - 1), 0);
}

#[test]
fn nothing_is_released_outside_of_the_segment() {
    let own = Segment::create("test", 2 * PAGE).unwrap();
    write(&own, 0, 1);
    for (offset, bytes) in [(PAGE, 2 * PAGE), (usize::MAX, 2), (2 * PAGE, 1)] {
        own.release(offset, bytes).unwrap_err();
    }
    own.release(2 * PAGE, 0).unwrap();
    assert_eq!(read(&own, 0), 1);
}

#[test]
fn a_forked_child_keeps_the_own_memory_and_not_that_of_others() {
    let own = Segment::create("test", PAGE).unwrap();
    let theirs = adopt_copy(&own);
    assert!(!mapping_flags(&own).contains(" dc "));
    assert!(mapping_flags(&theirs).contains(" dc "));
}
