#include "device.h"

#include <cstdlib>

namespace standin {

namespace {

constexpr int kDevices = 4;

int device_count() {
  const char* given = std::getenv("STANDIN_DEVICES");
  return given ? std::max(0, std::atoi(given)) : kDevices;
}

}  // namespace

std::shared_ptr<Stream> Device::new_stream(int priority) {
  auto stream = Stream::start(*this, priority);
  std::lock_guard lock(mutex_);
  std::erase_if(streams_, [](auto& stream) { return stream.expired(); });
  streams_.push_back(stream);
  return stream;
}

std::shared_ptr<Stream> Device::default_stream() {
  {
    std::lock_guard lock(mutex_);
    if (default_stream_) {
      return default_stream_;
    }
  }
  auto stream = new_stream(0);
  std::lock_guard lock(mutex_);
  if (default_stream_) {
    stream->end();  // Another thread was faster.
  } else {
    default_stream_ = stream;
  }
  return default_stream_;
}

std::vector<std::shared_ptr<Stream>> Device::streams() {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Stream>> alive;
  for (auto& stream : streams_) {
    if (auto held = stream.lock()) {
      alive.push_back(std::move(held));
    }
  }
  return alive;
}

DeviceMemory& device_memory() {
  static auto* memory = new DeviceMemory(device_count());
  return *memory;
}

std::vector<std::unique_ptr<Device>>& devices() {
  static auto* all = [] {
    auto* made = new std::vector<std::unique_ptr<Device>>;
    for (int index = 0; index < device_count(); ++index) {
      made->push_back(std::make_unique<Device>(index, device_memory()));
    }
    return made;
  }();
  return *all;
}

Device*& current_device() {
  thread_local Device* device = nullptr;
  return device;
}

Device* device_of(CUcontext context) {
  for (auto& device : devices()) {
    if (device->context() == context) {
      return device.get();
    }
  }
  return nullptr;
}

}  // namespace standin
