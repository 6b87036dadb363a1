//! The engine's log on its way to Python's `logging`.

use super::{guard, types};
use crate::error::Result;
use crate::observe::log::{self, LogRecord};
use ::log::{Level, LevelFilter};

/// Starts the log, or changes its level: 0 is off, 1 errors, 4 debug.
pub(super) fn start_log(level: u8) -> Result<()> {
    guard(|| {
        let levels = [LevelFilter::Off, LevelFilter::Error, LevelFilter::Warn, LevelFilter::Info];
        log::start(levels.get(usize::from(level)).copied().unwrap_or(LevelFilter::Debug));
        Ok(())
    })
}

/// Waits for records; an empty list means that the log was stopped.
pub(super) fn next_log_records() -> Result<Vec<types::LogRecord>> {
    guard(|| Ok(log::next_records().unwrap_or_default().into_iter().map(write_record).collect()))
}

pub(super) fn stop_log() -> Result<()> {
    guard(|| {
        log::stop();
        Ok(())
    })
}

fn write_record(record: LogRecord) -> types::LogRecord {
    let level = match record.level {
        Level::Error => 1,
        Level::Warn => 2,
        Level::Info => 3,
        Level::Debug | Level::Trace => 4,
    };
    let context = record.context.as_deref();
    types::LogRecord {
        level,
        module: record.module,
        group: context.map_or(String::new(), |context| context.group.clone()),
        rank: context.map_or(-1, |context| context.rank.into()),
        text: record.text,
        created: record.created,
    }
}
