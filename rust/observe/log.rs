//! The engine's log: records of the `log` crate, queued until Python's `logging` takes them.
//!
//! Any thread may log, the worker included, so a record only goes into a bounded queue; the one
//! thread that takes records out ([`next_records`]) is Python's. Logging must never wait for Python
//! or for a full queue: records that don't fit are counted and dropped. At a level that is off, a
//! record costs one load.
//!
//! Each record says which rank of which group it is about: a thread that works for a group is
//! inside a [`GroupContext`], and hands it on to the threads it starts ([`in_same_group`]).

use crate::sync::lock;
use log::{LevelFilter, Log, Metadata, Record};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// The queue's capacity before it drops records: far more than a start-up at debug level writes.
const CAPACITY: usize = 8192;

/// One record, as Python's `logging` needs it.
#[derive(Debug, Clone, PartialEq)]
pub struct LogRecord {
    pub level: log::Level,
    /// The module that wrote it.
    pub module: String,
    /// The rank and group it is about; `None` before a group is known.
    pub context: Option<Arc<GroupContext>>,
    pub text: String,
    /// Seconds since 1970.
    pub created: f64,
}

/// The group that a thread works for, and this process's rank in it.
#[derive(Debug, PartialEq, Eq)]
pub struct GroupContext {
    pub group: String,
    pub rank: u32,
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<GroupContext>>> = const { RefCell::new(None) };
}

/// Runs `work` with its records attributed to `context`.
pub fn in_group<T>(context: &Arc<GroupContext>, work: impl FnOnce() -> T) -> T {
    /// Puts the outer context back, also when `work` panics.
    struct Outer(Option<Arc<GroupContext>>);
    impl Drop for Outer {
        fn drop(&mut self) {
            CURRENT.set(self.0.take());
        }
    }
    let _outer = Outer(CURRENT.replace(Some(context.clone())));
    work()
}

/// `work` for a new thread, which logs for the same group as the thread that starts it.
pub fn in_same_group<T>(work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let context = CURRENT.with_borrow(Option::clone);
    move || match context {
        Some(context) => in_group(&context, work),
        None => work(),
    }
}

/// The queue between the engine and Python, of one process.
struct Queue {
    process: u32,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    records: VecDeque<LogRecord>,
    dropped: usize,
    is_closed: bool,
}

/// Replaced in a forked child: another thread may have held the parent's lock when it forked.
static QUEUE: AtomicPtr<Queue> = AtomicPtr::new(std::ptr::null_mut());

struct Logger;
static LOGGER: Logger = Logger;

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.level() <= log::max_level() && is_ours(metadata.target())
    }

    fn log(&self, record: &Record) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let Some(queue) = queue() else { return };
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        queue.push(LogRecord {
            level: record.level(),
            module: record.target().to_string(),
            context: CURRENT.with_borrow(Option::clone),
            text: record.args().to_string(),
            created: created.as_secs_f64(),
        });
    }

    fn flush(&self) {}
}

/// Other crates log too, at levels of their own.
fn is_ours(target: &str) -> bool {
    target.split("::").next() == Some("gflow")
}

/// This process's queue; `None` before [`start`], and in a forked child that has not started its own.
fn queue() -> Option<&'static Queue> {
    // SAFETY: a queue is made by `start`, published whole, and never freed.
    let queue = unsafe { QUEUE.load(Ordering::Acquire).as_ref() }?;
    (queue.process == std::process::id()).then_some(queue)
}

/// Starts logging at `level`, or changes the level. Records are kept from now on until
/// [`next_records`] takes them.
pub fn start(level: LevelFilter) {
    // Fails if it is set already, which is all we want.
    let _ = log::set_logger(&LOGGER);
    if queue().is_none_or(|queue| lock(&queue.state).is_closed) {
        QUEUE.store(Box::leak(Box::new(Queue::new())), Ordering::Release);
    }
    log::set_max_level(level);
}

/// Ends the log: whoever waits in [`next_records`] gets what is left.
pub fn stop() {
    log::set_max_level(LevelFilter::Off);
    if let Some(queue) = queue() {
        queue.close();
    }
}

/// Waits for records and takes all there are; `None` once the log is stopped and empty.
pub fn next_records() -> Option<Vec<LogRecord>> {
    queue()?.take()
}

impl Queue {
    fn new() -> Queue {
        Queue { process: std::process::id(), state: Mutex::default(), changed: Condvar::new() }
    }

    fn push(&self, record: LogRecord) {
        let mut state = lock(&self.state);
        if state.records.len() >= CAPACITY {
            state.dropped += 1;
            return;
        }
        state.records.push_back(record);
        drop(state);
        self.changed.notify_one();
    }

    fn take(&self) -> Option<Vec<LogRecord>> {
        let is_idle = |state: &mut State| state.records.is_empty() && !state.is_closed;
        let state = self.changed.wait_while(lock(&self.state), is_idle);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        let mut records: Vec<_> = state.records.drain(..).collect();
        let dropped = std::mem::take(&mut state.dropped);
        let last = records.last()?.clone();
        if dropped > 0 {
            let text = format!(
                "{dropped} log records were dropped: they came faster than Python wrote them"
            );
            records.push(LogRecord { level: log::Level::Warn, text, ..last });
        }
        Some(records)
    }

    fn close(&self) {
        lock(&self.state).is_closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn records_say_which_rank_of_which_group_they_are_about() {
        start(LevelFilter::Trace);
        let context = Arc::new(GroupContext { group: "a test of the log".into(), rank: 3 });
        in_group(&context, || {
            log::info!("on the caller's thread");
            log::error!(target: "another_crate", "not ours");
            let on_thread = in_same_group(|| log::trace!("on a thread it starts"));
            std::thread::spawn(on_thread).join().unwrap();
        });
        log::info!("of no group");
        // The other tests of this process log, too.
        let ours = |record: &LogRecord| record.context.as_ref() == Some(&context);
        let records: Vec<_> = next_records().unwrap().into_iter().filter(ours).collect();
        let texts: Vec<_> = records.iter().map(|record| record.text.as_str()).collect();
        assert_eq!(texts, ["on the caller's thread", "on a thread it starts"]);
        assert_eq!(records[0].level, log::Level::Info);
        assert!(records[0].module.starts_with("gflow::observe::log"));
        log::set_max_level(LevelFilter::Off);
    }

    #[test]
    fn a_full_queue_drops_records_and_says_how_many() {
        let queue = Queue::new();
        let record = LogRecord {
            level: log::Level::Info,
            module: "gflow".into(),
            context: None,
            text: "again".into(),
            created: 0.0,
        };
        (0..CAPACITY + 5).for_each(|_| queue.push(record.clone()));
        let records = queue.take().unwrap();
        assert_eq!(records.len(), CAPACITY + 1);
        assert!(records[CAPACITY].text.starts_with("5 log records were dropped"));
        assert_eq!(records[CAPACITY].level, log::Level::Warn);
    }

    #[test]
    fn the_reader_sleeps_until_there_is_a_record_and_ends_with_the_log() {
        let queue = Arc::new(Queue::new());
        let shared = queue.clone();
        let reader = std::thread::spawn(move || std::iter::from_fn(|| shared.take()).count());
        std::thread::sleep(Duration::from_millis(20));
        assert!(!reader.is_finished());
        queue.close();
        assert_eq!(reader.join().unwrap(), 0);
    }
}
