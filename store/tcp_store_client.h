#ifndef DDP_STORE_TCP_STORE_CLIENT_H_
#define DDP_STORE_TCP_STORE_CLIENT_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace ddp::store {

// A small client of TCPStore servers, ours (TcpStoreServer) and LibTorch's. Each call blocks, and
// has a deadline.
//
// Keys are the server's own names: those of LibTorch's clients begin with '/'. After an error the
// client is of no more use; connect another one. Thread-compatible.
class TcpStoreClient {
 public:
  // Connects to a name or an address, trying all addresses of a name, and again with growing
  // pauses until `timeout` is over: the server may start later than we, and so may its name.
  // kUnavailable: no server until then; the last reason is in the message.
  static absl::StatusOr<std::unique_ptr<TcpStoreClient>> Connect(const std::string& host, int port,
                                                                 absl::Duration timeout);
  ~TcpStoreClient();

  // kUnavailable: the connection ended. kDeadlineExceeded.
  absl::Status Set(const std::string& key, const std::string& value, absl::Duration timeout);

  // Waits for the key. kDeadlineExceeded: it did not come. kUnavailable: the connection ended.
  // kDataLoss: that is no TCPStore server.
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

#endif  // DDP_STORE_TCP_STORE_CLIENT_H_
