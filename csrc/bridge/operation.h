// Operation: what Rust sees of an operation that C++ holds. This header must not include torch:
// cargo compiles it by itself.
//
// Thread safety: prepare, open, start and finish are called only by the thread that runs the
// operation, each at most once and in this order; the other methods by any thread. All are const
// because Rust shares the object between threads.
#pragma once

#include "rust/cxx.h"

namespace gflow {

struct Done;
struct TensorSpans;

class Operation {
 public:
  virtual ~Operation() = default;

  // Makes the tensors exchangeable.
  virtual void prepare() const = 0;

  // The memory of the tensors, for a collective that the engine carries out itself. It stays valid
  // until the operation is destroyed.
  virtual TensorSpans open() const = 0;

  // Begins a collective on the inner backend, and raises `done` when it has ended.
  virtual void start(rust::Box<Done> done) const = 0;

  // Waits for what start() began and writes the results back; throws on failure.
  virtual void finish() const = 0;

  // Whether it failed because a connection broke.
  virtual bool broke_connection() const = 0;

  // Releases all waiters; `error` is empty on success. With `as_thrown` the error is one that the
  // operation threw, and waiters get that exception itself. Only the first call counts. Returns
  // whether notify() has to be called.
  virtual bool complete(rust::Str error, bool as_thrown) const = 0;

  // Completes the Future, which runs the user's callbacks. Call it with no lock and no GIL held.
  virtual void notify() const = 0;
};

}  // namespace gflow
