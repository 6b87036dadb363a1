// Sockets of TCP that never block but in poll, where an alarm can wake them.

#pragma once

#include <netinet/in.h>

#include <cstddef>
#include <string>

#include "alarm.h"

namespace standin {

// The other end is gone.
struct Lost {
  std::string reason;
};

// The alarm has rung.
struct Interrupted {};

class Socket {
 public:
  Socket() = default;
  explicit Socket(int file) : file_(file) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : file_(other.file_) { other.file_ = -1; }
  Socket& operator=(Socket&& other) noexcept;

  // These throw Lost or Interrupted.
  static Socket connect(const sockaddr_in& to, const Alarm& alarm);
  Socket accept(const Alarm& alarm) const;
  void send_all(const void* data, size_t bytes, const Alarm& alarm) const;
  void receive_all(void* data, size_t bytes, const Alarm& alarm) const;

  // What can be moved at once, perhaps nothing. Throw Lost.
  size_t send_some(const void* data, size_t bytes) const;
  size_t receive_some(void* data, size_t bytes) const;

  static Socket listen(const in_addr& at);
  sockaddr_in address() const;

  int file() const { return file_; }
  bool is_open() const { return file_ >= 0; }
  void close();

 private:
  void await(short events, const Alarm& alarm) const;

  int file_ = -1;
};

// The address of this process for others: that of STANDIN_ADDRESS, of the interface that
// NCCL_SOCKET_IFNAME names, or 127.0.0.1.
in_addr own_address();

}  // namespace standin
