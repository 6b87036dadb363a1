// An alarm: once triggered, it wakes everyone who waits for a socket with it, now and later.

#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>

namespace standin {

class Alarm {
 public:
  Alarm() : file_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  ~Alarm() { close(file_); }
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

  void ring() {
    uint64_t one = 1;
    if (write(file_, &one, sizeof one) < 0) {
      return;  // The counter is full, so it is already ringing.
    }
  }

  // Readable once it has rung.
  int file() const { return file_; }

 private:
  int file_;
};

}  // namespace standin
