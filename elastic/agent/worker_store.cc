#include "elastic/agent/worker_store.h"

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ddp::elastic {

absl::StatusOr<int> WorkerStore::Prepare() {
  store::TcpStoreServer* const kept = given_ != nullptr          ? given_
                                      : config_.master_port != 0 ? own_.get()
                                                                 : nullptr;
  if (kept != nullptr) {
    kept->Hold();
    return kept->port();
  }
  // A single node needs only the loopback address.
  const bool local = config_.job.limits.max_nodes == 1 && config_.master_addr == "127.0.0.1";
  absl::StatusOr<std::unique_ptr<store::TcpStoreServer>> server = store::TcpStoreServer::Listen(
      event_loop_, local ? config_.master_addr : "", config_.master_port);
  if (!server.ok()) {
    if (config_.master_port == 0) return server.status();
    return absl::Status(server.status().code(),
                        absl::StrCat("--master-port=", config_.master_port, ": ",
                                     std::string(server.status().message())));
  }
  if (config_.master_port != 0) {
    own_ = *std::move(server);
    own_->Hold();
    return own_->port();
  }
  next_ = *std::move(server);
  return next_->port();
}

void WorkerStore::Serve(bool serves) {
  store::TcpStoreServer* const kept = given_ != nullptr ? given_ : own_.get();
  if (given_ == nullptr && config_.master_port == 0) {
    own_ = serves ? std::move(next_) : nullptr;
    next_.reset();
  } else if (serves) {
    // A server on the user's port is kept even if this node does not hold rank 0: it may hold it in
    // a later generation.
    kept->Renew();
  }
}

}  // namespace ddp::elastic
