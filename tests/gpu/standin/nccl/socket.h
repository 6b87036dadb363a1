// TCP sockets that block only in poll, where an alarm can wake them.

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

// The alarm was triggered.
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

  // Transfers what it can without blocking, possibly nothing. Throws Lost.
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

// The address that other ranks connect to: STANDIN_ADDRESS, that of the interface in
// NCCL_SOCKET_IFNAME, or 127.0.0.1.
in_addr own_address();

}  // namespace standin
