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
    kept->Clear();
    return kept->port();
  }
  own_.reset();
  // One node needs no other address than the loopback.
  const bool local = config_.max_nodes == 1 && config_.master_addr == "127.0.0.1";
  absl::StatusOr<std::unique_ptr<store::TcpStoreServer>> server = store::TcpStoreServer::Listen(
      event_loop_, local ? config_.master_addr : "", config_.master_port);
  if (!server.ok()) {
    if (config_.master_port == 0) return server.status();
    return absl::Status(server.status().code(),
                        absl::StrCat("--master-port=", config_.master_port, ": ",
                                     std::string(server.status().message())));
  }
  own_ = *std::move(server);
  return own_->port();
}

void WorkerStore::Settle(bool serves) {
  // The user's port is kept: in a later generation this node may hold rank 0.
  if (!serves && config_.master_port == 0) own_.reset();
}

}  // namespace ddp::elastic
