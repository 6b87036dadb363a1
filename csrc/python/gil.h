// WithoutGil: releases the GIL for a scope. Our threads may need it to finish, so waiting for them
// while holding it would deadlock.
#pragma once

#include <Python.h>

namespace gflow {

class WithoutGil {
 public:
  // Destructors run with or without the GIL, and even after the interpreter has ended.
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

}  // namespace gflow
