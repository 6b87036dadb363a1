// Lets go of Python's lock for a scope. Our threads may need it to finish, so waiting for them
// with the lock held would never end.
#pragma once

#include <Python.h>

namespace gflow {

class WithoutGil {
 public:
  // Destructors run with or without the lock, and once more after the interpreter has gone.
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
