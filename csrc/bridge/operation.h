// What Rust sees of an operation that C++ holds. This header must never include torch: cargo
// compiles it on its own.
#pragma once

#include "rust/cxx.h"

namespace gflow {

struct Done;
struct TensorSpans;

// The methods are const because Rust shares the object between threads; each says who calls it.
class Operation {
 public:
  virtual ~Operation() = default;

  // Makes its tensors such that they can be exchanged. Comes first, and once, by whoever runs it.
  virtual void prepare() const = 0;

  // The memory of its tensors, for a collective that the engine carries out itself. Whoever runs
  // it asks once; the memory stays until the operation is gone.
  virtual TensorSpans open() const = 0;

  // Begins a collective on the inner backend and raises `done` when it is over. Only whoever runs
  // it calls it.
  virtual void start(rust::Box<Done> done) const = 0;

  // Waits for what was begun and puts the results where they belong; throws on failure. Called
  // once, by whoever runs the operation.
  virtual void finish() const = 0;

  // Whether it failed because a connection did.
  virtual bool broke_connection() const = 0;

  // Releases whoever waits; `error` is empty on success. With `as_thrown` the error is what the
  // operation threw, and the waiting get that exception itself. Any thread, only the first call
  // counts. Returns whether notify() is owed.
  virtual bool settle(rust::Str error, bool as_thrown) const = 0;

  // Completes the Future, which runs the user's callbacks. Never with a lock or the GIL held.
  virtual void notify() const = 0;
};

}  // namespace gflow
