// Handles: pointers to our objects that a program holds. An unknown or stale one is detected
// instead of dereferenced.

#pragma once

#include <map>
#include <memory>
#include <mutex>

namespace standin {

template <typename Object>
class Handles {
 public:
  Object* add(std::shared_ptr<Object> object) {
    std::lock_guard lock(mutex_);
    Object* handle = object.get();
    objects_[handle] = std::move(object);
    return handle;
  }

  std::shared_ptr<Object> find(const void* handle) {
    std::lock_guard lock(mutex_);
    auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }

  std::shared_ptr<Object> take(const void* handle) {
    std::lock_guard lock(mutex_);
    auto found = objects_.find(handle);
    if (found == objects_.end()) {
      return nullptr;
    }
    auto object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

 private:
  std::mutex mutex_;
  std::map<const void*, std::shared_ptr<Object>> objects_;
};

}  // namespace standin
