// What Rust sees of a collective that C++ holds. This header must never include torch: cargo
// compiles it on its own.
#pragma once

#include "rust/cxx.h"

namespace gflow {

// The methods are const because Rust shares the object between threads; each says who calls it.
class Operation {
 public:
  virtual ~Operation() = default;

  // Moves the data. Called once, by the group's worker. Throws on failure.
  virtual void run() const = 0;

  // Releases whoever waits; `error` is empty on success. With `as_thrown` the error is what run()
  // threw, and the waiting get that exception itself. Any thread, only the first call counts.
  // Returns whether notify() is owed.
  virtual bool settle(rust::Str error, bool as_thrown) const = 0;

  // Completes the Future, which runs the user's callbacks. Never with a lock or the GIL held.
  virtual void notify() const = 0;
};

}  // namespace gflow
