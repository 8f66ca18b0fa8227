#ifndef DDP_RPC_REMOTE_H_
#define DDP_RPC_REMOTE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <ATen/core/ivalue.h>

#include "ddp/rpc/call.h"
#include "ddp/rpc/carried_uses.h"
#include "ddp/rpc/registry.h"
#include "ddp/rpc/transport.h"
#include "ddp/rpc/value.h"

namespace ddp::rpc {

namespace internal {

// This worker's use of an object of some worker. The owner keeps the object while a worker uses it.
class ObjectUse {
 public:
  // Takes over one user that the owner has counted already.
  ObjectUse(int owner, int64_t id) : owner_(owner), id_(id) {}
  ~ObjectUse() { ReleaseUse(owner_, id_); }
  ObjectUse(const ObjectUse&) = delete;
  ObjectUse& operator=(const ObjectUse&) = delete;

  int owner() const { return owner_; }
  int64_t id() const { return id_; }
  std::string owner_name() const { return Transport::Get()->NameOf(owner_); }
  bool local() const { return Transport::Get()->id() == owner_; }

  // Makes the owner count one more user: for the receiver of a message. Blocks until it has.
  void AddUser() const;

 private:
  const int owner_;
  const int64_t id_;
};

}  // namespace internal

// A name for an object of type T on some worker. Copies are cheap and name the same object. It may
// be an argument or a result of calls, also to a third worker. The object lives until no worker has
// an RRef to it. It lives until its owner shuts down when an RRef to it was on a lost worker, in a
// message that was lost or whose answer came too late, or in the answer of a Future that was
// dropped in an autograd context.
//
// The reference count is our own (object_table.h), not that of LibTorch's RRefs, whose owner
// crashes when an RRef has two users. Thread-compatible.
template <typename T>
class RRef {
 public:
  explicit RRef(std::shared_ptr<internal::ObjectUse> use) : use_(std::move(use)) {}

  std::string owner() const { return use_->owner_name(); }

  // Calls a registered method of the object: as rpc::async() and rpc::sync() with the owner.
  template <typename R, typename... A>
  Future<R> async(const std::string& method, A&&... arguments) const {
    const std::string& name = internal::Transport::Get()->registry().class_name<T>();
    return internal::Start<R>(
        {.worker = owner(), .function = name + "." + method, .timeout = {}, .keep = use_},
        use_->id(), internal::AsValue(std::forward<A>(arguments))...);
  }
  template <typename R, typename... A>
  R sync(const std::string& method, A&&... arguments) const {
    return async<R>(method, std::forward<A>(arguments)...).wait();
  }

  // Returns the object itself. Throws ConfigurationError on a worker that does not own it.
  std::shared_ptr<T> local() const {
    if (!use_->local()) throw ConfigurationError("the object is on worker " + owner());
    const auto object = internal::Transport::Get()->objects().Get(use_->id());
    return std::static_pointer_cast<T>(object.instance);
  }

  const std::shared_ptr<internal::ObjectUse>& use() const { return use_; }

 private:
  std::shared_ptr<internal::ObjectUse> use_;
};

// Makes an object of the registered class T on a worker, with the constructor's arguments. T is
// registered on both workers. Blocks until it is made. Throws as Future::wait().
template <typename T, typename... A>
RRef<T> remote(const Callee& callee, A&&... arguments) {
  const auto transport = internal::Transport::Get();
  const std::string& name = transport->registry().class_name<T>();
  const int64_t id =
      internal::Start<int64_t>(
          {.worker = callee.name, .function = name + ".new", .timeout = callee.timeout},
          internal::AsValue(std::forward<A>(arguments))...)
          .wait();
  return RRef<T>(std::make_shared<internal::ObjectUse>(transport->IdOf(callee.name), id));
}

// Returns an RRef to an object of this worker, to hand out to others. T is registered.
template <typename T>
RRef<T> share(std::shared_ptr<T> object) {
  const auto transport = internal::Transport::Get();
  const std::string& name = transport->registry().class_name<T>();
  const int64_t id = transport->objects().Add(Registry::ObjectOf(std::move(object), name));
  return RRef<T>(std::make_shared<internal::ObjectUse>(transport->id(), id));
}

// An RRef travels as its class, its owner and its number. The receiver takes over the user that the
// sender has added.
template <typename T>
struct Value<RRef<T>> {
  static std::string Name() { return "RRef"; }
  static c10::IValue To(const RRef<T>& value) {
    const std::string& name = internal::Transport::Get()->registry().class_name<T>();
    value.use()->AddUser();
    internal::CarriedUses::Add(value.use()->owner(), value.use()->id());
    return internal::CarriedUses::Write(name, value.use()->owner(), value.use()->id());
  }
  static RRef<T> From(const c10::IValue& value) {
    const auto [mark, name, owner, id] =
        Value<std::tuple<std::string, std::string, int, int64_t>>::From(value);
    auto use = std::make_shared<internal::ObjectUse>(owner, id);
    internal::CarriedUses::Take(owner, id);
    const std::string& expected = internal::Transport::Get()->registry().class_name<T>();
    if (name != expected) {
      throw ConfigurationError("expected an RRef of " + expected + ", got one of " + name);
    }
    return RRef<T>(std::move(use));
  }
};

}  // namespace ddp::rpc

#endif  // DDP_RPC_REMOTE_H_
