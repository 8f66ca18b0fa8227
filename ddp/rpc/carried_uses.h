#ifndef DDP_RPC_CARRIED_USES_H_
#define DDP_RPC_CARRIED_USES_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>

namespace ddp::rpc::internal {

// Ends one use of an object (object_table.h). Never throws.
void ReleaseUse(int owner, int64_t id);

// The users that RRefs in one message carry. The sender adds a user for each RRef that it writes;
// the receiver's RRef takes the user over. A user that is left at the end of this object has no
// RRef and is released: of a message that was not sent, or that the receiver has refused.
//
// Objects on one thread are nested.
class CarriedUses {
 public:
  CarriedUses() : outer_(std::exchange(Innermost(), this)) {}
  ~CarriedUses() {
    Innermost() = outer_;
    for (const auto& [owner, id] : uses_) ReleaseUse(owner, id);
  }
  CarriedUses(const CarriedUses&) = delete;
  CarriedUses& operator=(const CarriedUses&) = delete;

  // The form of an RRef in a message.
  static c10::IValue Write(const std::string& class_name, int owner, int64_t id) {
    return c10::ivalue::Tuple::create({c10::IValue(kMark), c10::IValue(class_name),
                                       c10::IValue(static_cast<int64_t>(owner)), c10::IValue(id)});
  }

  // Adds the users of all RRefs in `value`, which has been received.
  void Read(const c10::IValue& value) {
    if (!value.isTuple()) return;
    const auto& parts = value.toTupleRef().elements();
    if (parts.size() == 4 && parts[0].isString() && parts[0].toStringRef() == kMark &&
        parts[2].isInt() && parts[3].isInt()) {
      uses_.emplace_back(static_cast<int>(parts[2].toInt()), parts[3].toInt());
      return;
    }
    for (const c10::IValue& part : parts) Read(part);
  }

  // The message is on its way: the receiver has the users.
  void OnSent() { uses_.clear(); }

  // The owner has counted a user for an RRef that is written.
  static void Add(int owner, int64_t id) {
    if (Innermost() != nullptr) Innermost()->uses_.emplace_back(owner, id);
  }

  // An RRef has taken over a user of a message that is being read.
  static void Take(int owner, int64_t id) {
    for (CarriedUses* uses = Innermost(); uses != nullptr; uses = uses->outer_) {
      const auto found = std::find(uses->uses_.begin(), uses->uses_.end(), std::pair(owner, id));
      if (found == uses->uses_.end()) continue;
      uses->uses_.erase(found);
      return;
    }
  }

 private:
  static constexpr char kMark[] = "ddp.rpc.RRef";

  static CarriedUses*& Innermost() {
    static thread_local CarriedUses* innermost = nullptr;
    return innermost;
  }

  CarriedUses* const outer_;
  std::vector<std::pair<int, int64_t>> uses_;  // owner, id
};

}  // namespace ddp::rpc::internal

#endif  // DDP_RPC_CARRIED_USES_H_
