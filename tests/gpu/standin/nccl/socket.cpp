#include "socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace standin {

namespace {

[[noreturn]] void fail(const char* what) { throw Lost{std::string(what) + ": " + strerror(errno)}; }

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

Socket open() {
  int file = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (file < 0) {
    fail("could not open a socket");
  }
  return Socket(file);
}

void send_at_once(int file) {
  int yes = 1;
  setsockopt(file, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

// Parsed as NCCL does: a list of name prefixes; "=" matches exact names, "^" excludes.
bool is_wanted(const std::string& name, std::string wanted) {
  bool is_exact = false;
  bool is_inverted = false;
  if (wanted.starts_with('^')) {
    is_inverted = true;
    wanted.erase(0, 1);
  }
  if (wanted.starts_with('=')) {
    is_exact = true;
    wanted.erase(0, 1);
  }
  std::istringstream list(wanted);
  bool is_listed = false;
  for (std::string one; std::getline(list, one, ',');) {
    is_listed |= is_exact ? name == one : name.starts_with(one);
  }
  return is_listed != is_inverted;
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(file_, other.file_);
  return *this;
}

void Socket::close() {
  if (file_ >= 0) {
    ::close(file_);
    file_ = -1;
  }
}

void Socket::await(short events, const Alarm& alarm) const {
  pollfd files[] = {{file_, events, 0}, {alarm.file(), POLLIN, 0}};
  while (poll(files, 2, -1) < 0) {
    if (errno != EINTR) {
      fail("could not wait for a socket");
    }
  }
  if (files[1].revents != 0) {
    throw Interrupted{};
  }
}

Socket Socket::connect(const sockaddr_in& to, const Alarm& alarm) {
  Socket socket = open();
  if (::connect(socket.file_, reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0) {
    if (errno != EINPROGRESS) {
      fail("could not connect");
    }
    socket.await(POLLOUT, alarm);
    socklen_t length = sizeof errno;
    int error = 0;
    getsockopt(socket.file_, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) {
      errno = error;
      fail("could not connect");
    }
  }
  send_at_once(socket.file_);
  return socket;
}

Socket Socket::accept(const Alarm& alarm) const {
  for (;;) {
    int file = accept4(file_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (file >= 0) {
      send_at_once(file);
      return Socket(file);
    }
    if (!would_block() && errno != ECONNABORTED) {
      fail("could not accept a connection");
    }
    await(POLLIN, alarm);
  }
}

Socket Socket::listen(const in_addr& at) {
  Socket socket = open();
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr = at;
  if (bind(socket.file_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(socket.file_, SOMAXCONN) != 0) {
    fail("could not listen");
  }
  return socket;
}

sockaddr_in Socket::address() const {
  sockaddr_in address{};
  socklen_t length = sizeof address;
  getsockname(file_, reinterpret_cast<sockaddr*>(&address), &length);
  return address;
}

size_t Socket::send_some(const void* data, size_t bytes) const {
  ssize_t sent = ::send(file_, data, bytes, MSG_NOSIGNAL);
  if (sent >= 0) {
    return sent;
  }
  if (!would_block()) {
    fail("could not send");
  }
  return 0;
}

size_t Socket::receive_some(void* data, size_t bytes) const {
  ssize_t received = ::recv(file_, data, bytes, 0);
  if (received > 0) {
    return received;
  }
  if (received == 0 && bytes > 0) {
    throw Lost{"it has closed the connection"};
  }
  if (received < 0 && !would_block()) {
    fail("could not receive");
  }
  return 0;
}

void Socket::send_all(const void* data, size_t bytes, const Alarm& alarm) const {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    size_t sent = send_some(at, bytes);
    at += sent;
    bytes -= sent;
    if (sent == 0) {
      await(POLLOUT, alarm);
    }
  }
}

void Socket::receive_all(void* data, size_t bytes, const Alarm& alarm) const {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    size_t received = receive_some(at, bytes);
    at += received;
    bytes -= received;
    if (received == 0) {
      await(POLLIN, alarm);
    }
  }
}

in_addr own_address() {
  in_addr address{htonl(INADDR_LOOPBACK)};
  if (const char* given = std::getenv("STANDIN_ADDRESS")) {
    inet_pton(AF_INET, given, &address);
    return address;
  }
  const char* wanted = std::getenv("NCCL_SOCKET_IFNAME");
  ifaddrs* interfaces = nullptr;
  if (!wanted || getifaddrs(&interfaces) != 0) {
    return address;
  }
  for (ifaddrs* one = interfaces; one; one = one->ifa_next) {
    if (one->ifa_addr && one->ifa_addr->sa_family == AF_INET && is_wanted(one->ifa_name, wanted)) {
      address = reinterpret_cast<sockaddr_in*>(one->ifa_addr)->sin_addr;
      break;
    }
  }
  freeifaddrs(interfaces);
  return address;
}

}  // namespace standin
