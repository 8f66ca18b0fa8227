#ifndef DDP_STORE_TCP_STORE_TCP_STORE_CLIENT_H_
#define DDP_STORE_TCP_STORE_TCP_STORE_CLIENT_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace ddp::store {

// A small client of TCPStore servers, ours (TcpStoreServer) and LibTorch's. Each call blocks until
// its deadline at most; only the lookup of the name in Connect() may take longer.
//
// Keys go to the server unchanged. LibTorch's clients put '/' before every key: their key "a" is
// "/a" here. After an error do not use the client; connect another one. Thread-compatible.
class TcpStoreClient {
 public:
  // Connects to a name or an address. Tries all addresses of a name, and again with growing pauses
  // until `timeout` is over, because the server or its name may appear later. kUnavailable: no
  // server until then; the message has the last reason.
  static absl::StatusOr<std::unique_ptr<TcpStoreClient>> Connect(const std::string& host, int port,
                                                                 absl::Duration timeout);
  ~TcpStoreClient();

  // Returns when the server has applied the set. kUnavailable: the connection ended.
  // kDeadlineExceeded: no reply within `timeout`.
  absl::Status Set(const std::string& key, const std::string& value, absl::Duration timeout);

  // Blocks until the key has a value, and returns it. kDeadlineExceeded: the key did not appear.
  // kUnavailable: the connection ended. kDataLoss: the server announces a value of more than 1 MiB.
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout);

 private:
  TcpStoreClient(std::string server, UniqueFd fd);

  absl::Status Validate(absl::Time deadline);
  absl::Status Send(const std::string& bytes, absl::Time deadline);
  absl::StatusOr<std::string> Receive(size_t size, absl::Time deadline);

  const std::string server_;  // HOST:PORT, for messages
  UniqueFd fd_;
};

}  // namespace ddp::store

#endif  // DDP_STORE_TCP_STORE_TCP_STORE_CLIENT_H_
