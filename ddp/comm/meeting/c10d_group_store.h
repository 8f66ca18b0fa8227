#ifndef DDP_COMM_MEETING_C10D_GROUP_STORE_H_
#define DDP_COMM_MEETING_C10D_GROUP_STORE_H_

#include <memory>

#include <c10/util/intrusive_ptr.h>

#include "ddp/comm/meeting/group_store.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace ddp::internal {

// Returns a GroupStore on `store`, which must have compareSet and add; all of LibTorch's have.
// Commands for several keys need hasExtendedApi(); other stores get one command for each key.
std::shared_ptr<GroupStore> MakeGroupStore(c10::intrusive_ptr<c10d::Store> store);

}  // namespace ddp::internal

#endif  // DDP_COMM_MEETING_C10D_GROUP_STORE_H_
