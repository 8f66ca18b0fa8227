#ifndef DDP_RPC_OBJECT_TABLE_H_
#define DDP_RPC_OBJECT_TABLE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <typeindex>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/mutex.h"
#include "ddp/common/error.h"

namespace ddp::rpc::internal {

// A thing that belongs to an object and dies with it: its optimizer. Thread-safe.
class Attachment {
 public:
  // Returns the attached thing, which `make` makes at the first call. All callers name one type.
  template <typename T, typename Make>
  std::shared_ptr<T> Get(const Make& make) {
    const MutexLock lock(mutex_);
    if (thing_ == nullptr) thing_ = std::shared_ptr<T>(make());
    return std::static_pointer_cast<T>(thing_);
  }

 private:
  Mutex mutex_;
  std::shared_ptr<void> thing_ ABSL_GUARDED_BY(mutex_);
};

// An object that other workers may use by its number.
struct RemoteObject {
  std::shared_ptr<void> instance;
  std::type_index type = typeid(void);
  std::string class_name;                               // as registered
  std::function<std::vector<at::Tensor>()> parameters;  // empty: the class has none
  std::shared_ptr<Attachment> attachment = std::make_shared<Attachment>();
};

// The objects of this worker that RRefs name, with a count of the RRefs that name each. A worker
// counts as one user, however many copies of an RRef it has. A sender adds a user for the receiver
// before it sends an RRef, so a count never reaches zero too early. An RRef that
// nobody receives (see RRef) leaves a count too high: the object then lives until this worker shuts
// down.
//
// Thread-safe.
class ObjectTable {
 public:
  // Adds an object with one user. Returns its number.
  int64_t Add(RemoteObject object) {
    MutexLock lock(mutex_);
    objects_[next_] = {.object = std::move(object), .users = 1};
    return next_++;
  }

  // Throws ConfigurationError for a number without an object.
  RemoteObject Get(int64_t id) const {
    MutexLock lock(mutex_);
    return Find(id)->second.object;
  }

  void AddUser(int64_t id) {
    MutexLock lock(mutex_);
    ++Find(id)->second.users;
  }

  // The last user's release destroys the object, on this thread.
  void Release(int64_t id) {
    RemoteObject last;  // destroyed without the lock
    MutexLock lock(mutex_);
    const auto found = Find(id);
    if (--found->second.users > 0) return;
    last = std::move(found->second.object);
    objects_.erase(found);
  }

  size_t size() const {
    MutexLock lock(mutex_);
    return objects_.size();
  }

 private:
  struct Entry {
    RemoteObject object;
    int64_t users = 0;
  };

  std::map<int64_t, Entry>::iterator Find(int64_t id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto found = objects_.find(id);
    if (found == objects_.end()) {
      throw ConfigurationError("there is no object " + std::to_string(id) + " (any more)");
    }
    return found;
  }

  mutable Mutex mutex_;
  mutable std::map<int64_t, Entry> objects_ ABSL_GUARDED_BY(mutex_);
  int64_t next_ ABSL_GUARDED_BY(mutex_) = 1;
};

}  // namespace ddp::rpc::internal

#endif  // DDP_RPC_OBJECT_TABLE_H_
