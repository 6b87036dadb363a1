//! A cache on disk for what takes seconds to build and always comes out the same. It never causes a
//! failure: files that are damaged, of another user, or cannot be written are rebuilt.

use sha2::{Digest, Sha256};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A file starts with this, followed by the checksum and the content.
const MAGIC: &[u8; 8] = b"gflow c1";
const CHECKSUM_BYTES: usize = 32;

/// The cache folder; None if this user has none.
pub fn folder() -> Option<PathBuf> {
    folder_from(|name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))
}

fn folder_from(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let below = |name, path| variable(name).map(|folder| folder.join(path));
    variable("GFLOW_CACHE")
        .or_else(|| below("XDG_CACHE_HOME", "gflow"))
        .or_else(|| below("HOME", ".cache/gflow"))
}

/// Returns the cached entry `name`, or builds and keeps it. `key` is everything that the content
/// depends on.
pub fn get_or_build<E>(
    folder: Option<&Path>,
    name: &str,
    key: &[&[u8]],
    build: impl FnOnce() -> Result<Vec<u8>, E>,
) -> Result<Vec<u8>, E> {
    let Some(folder) = folder else { return build() };
    let path = folder.join(format!("{name}-{}", hex(&digest(key)[..16])));
    if let Some(content) = read(&path) {
        log::debug!("{name}: from the cache, {}", path.display());
        return Ok(content);
    }
    let content = build()?;
    match write(folder, &path, &content) {
        Ok(()) => log::debug!("{name}: kept in the cache, {}", path.display()),
        Err(error) => log::debug!("{name}: not kept in the cache, {}: {error}", path.display()),
    }
    Ok(content)
}

fn read(path: &Path) -> Option<Vec<u8>> {
    let metadata = std::fs::metadata(path).ok()?;
    // The content is executed: accept only files that this user alone can write.
    if metadata.uid() != rustix::process::geteuid().as_raw() || metadata.mode() & 0o022 != 0 {
        return None;
    }
    let file = std::fs::read(path).ok()?;
    let (checksum, content) = file.strip_prefix(MAGIC)?.split_at_checked(CHECKSUM_BYTES)?;
    (checksum == digest(&[content])).then(|| content.to_vec())
}

/// Writes atomically: concurrent readers see the whole file or none.
fn write(folder: &Path, path: &Path, content: &[u8]) -> io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let new = folder.join(format!("new-{}-{count}", std::process::id()));
    let outcome = (|| {
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(&new)?;
        file.write_all(MAGIC)?;
        file.write_all(&digest(&[content]))?;
        file.write_all(content)?;
        drop(file);
        std::fs::rename(&new, path)
    })();
    if outcome.is_err() {
        let _ = std::fs::remove_file(&new);
    }
    outcome
}

/// Includes the lengths, so that different lists of parts never hash alike.
fn digest(parts: &[&[u8]]) -> [u8; CHECKSUM_BYTES] {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    digest.finalize().into()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A temporary folder, removed on drop.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let name = format!("gflow-cache-test-{}-{name}", std::process::id());
            Folder(std::env::temp_dir().join(name))
        }

        fn files(&self) -> Vec<PathBuf> {
            let entries = std::fs::read_dir(&self.0).unwrap();
            entries.map(|entry| entry.unwrap().path()).collect()
        }

        /// Gets "thing" with this key, and whether it was built now.
        fn ask(&self, parts: &[&[u8]]) -> (Vec<u8>, bool) {
            let mut is_new = false;
            let make = || {
                is_new = true;
                Ok::<_, ()>(b"content".to_vec())
            };
            let content = get_or_build(Some(&self.0), "thing", parts, make).unwrap();
            (content, is_new)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_was_made_is_found_again_and_nothing_else_is_left_behind() {
        let folder = Folder::new("again");
        assert_eq!(folder.ask(&[b"a", b"b"]), (b"content".to_vec(), true));
        assert_eq!(folder.ask(&[b"a", b"b"]), (b"content".to_vec(), false));
        assert_eq!(folder.files().len(), 1);
        let mode = std::fs::metadata(&folder.0).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn what_is_made_of_other_parts_is_another_thing() {
        let folder = Folder::new("parts");
        let all: [&[&[u8]]; 4] = [&[b"a", b"b"], &[b"ab"], &[b"ab", b""], &[b"b", b"a"]];
        assert!(all.into_iter().all(|parts| folder.ask(parts).1));
        assert_eq!(folder.files().len(), all.len());
    }

    #[test]
    fn a_damaged_file_is_made_anew_whatever_was_done_to_it() {
        let folder = Folder::new("damaged");
        folder.ask(&[b"a"]);
        let [path] = &folder.files()[..] else { panic!("one file") };
        let whole = std::fs::read(path).unwrap();
        let mut cases: Vec<Vec<u8>> = (0..whole.len()).map(|end| whole[..end].to_vec()).collect();
        cases.extend((0..whole.len()).map(|at| {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            bytes
        }));
        cases.push([&whole[..], b"more"].concat());
        for damaged in cases {
            std::fs::write(path, &damaged).unwrap();
            assert_eq!(folder.ask(&[b"a"]), (b"content".to_vec(), true), "{damaged:?}");
            assert_eq!(std::fs::read(path).unwrap(), whole);
        }
    }

    #[test]
    fn a_file_that_others_could_have_written_is_not_used() {
        let folder = Folder::new("others");
        folder.ask(&[b"a"]);
        let [path] = &folder.files()[..] else { panic!("one file") };
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o666)).unwrap();
        assert!(folder.ask(&[b"a"]).1);
        assert!(!folder.ask(&[b"a"]).1);
    }

    #[test]
    fn without_a_folder_or_where_none_can_be_made_it_is_made_every_time() {
        let make = || Ok::<_, ()>(vec![7]);
        assert_eq!(get_or_build(None, "thing", &[], make), Ok(vec![7]));
        let folder = Folder::new("blocked");
        std::fs::write(&folder.0, b"a file where the folder should be").unwrap();
        for _ in 0..2 {
            assert_eq!(get_or_build(Some(&folder.0), "thing", &[], make), Ok(vec![7]));
        }
        std::fs::remove_file(&folder.0).unwrap();
    }

    #[test]
    fn what_cannot_be_made_is_not_kept() {
        let folder = Folder::new("failing");
        assert_eq!(get_or_build(Some(&folder.0), "thing", &[], || Err("no")), Err("no"));
        assert!(!folder.0.exists());
    }

    #[test]
    fn the_users_own_variables_say_where_it_is() {
        let set = |names: &'static [&str]| {
            folder_from(move |name| names.contains(&name).then(|| PathBuf::from("/x")))
        };
        assert_eq!(set(&["GFLOW_CACHE", "XDG_CACHE_HOME", "HOME"]), Some("/x".into()));
        assert_eq!(set(&["XDG_CACHE_HOME", "HOME"]), Some("/x/gflow".into()));
        assert_eq!(set(&["HOME"]), Some("/x/.cache/gflow".into()));
        assert_eq!(set(&[]), None);
    }
}
