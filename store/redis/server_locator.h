#ifndef DDP_STORE_REDIS_SERVER_LOCATOR_H_
#define DDP_STORE_REDIS_SERVER_LOCATOR_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::store {

// Decides where a client looks for its server: at the known address, or at the addresses that the
// server's name has now. The lookup of a name may take many seconds in a broken network, so the
// client should not make one for each attempt to connect.
//
// Rules:
//   - The client has not reached the server yet: the name is due.
//   - The client has reached the server: the address is known, and the name is not due.
//   - An attempt at the known address fails: the name is due half a minute later. Further failures
//     do not move that time.
//   - A lookup ends: the next one is due half a minute later. Without a known address the next one
//     is due after Options::first_name_pause.
//   - The server at the known address is doubted: the name is due at once.
//   - A numeric address or a unix socket has no name: it is always known, and never due.
//
// Pure: events and the time in, decisions out. Thread-compatible.
class ServerLocator {
 public:
  struct Options {
    // The pause after a lookup that failed, while no address is known.
    absl::Duration first_name_pause = absl::ZeroDuration();
  };

  ServerLocator(const RedisEndpoint& endpoint, const Options& options);

  // Events. ---------------------------------------------------------------------------------------

  // The client reached the server at `address`: a numeric address, or "" for a unix socket.
  void Reached(const std::string& address);

  // An attempt at the known addresses failed: the server refused the connection, did not answer, or
  // refused the greeting.
  void Lost(absl::Time now);

  // The server at the known address is not the master: it never was, or it has been demoted
  // (READONLY, MASTERDOWN).
  void Doubt();

  // A lookup of the name ended with `addresses`, at least one. They replace the known ones.
  void NameFound(std::vector<std::string> addresses, absl::Time now);

  // A lookup of the name failed, or no address that it found could be reached.
  void NameFailed(const absl::Status& why, absl::Time now);

  // Decisions. ------------------------------------------------------------------------------------

  bool NameIsDue(absl::Time now) const { return has_name_ && now >= name_due_; }

  bool knows_address() const { return !addresses_.empty(); }

  // Returns how many addresses are known.
  size_t address_count() const { return addresses_.size(); }

  // Returns the endpoint with the next known address in place of the name. The addresses take
  // turns. CHECKs that there is one.
  RedisEndpoint NextTarget();

  // Returns the error of the last lookup that failed. OK: none has failed.
  const absl::Status& name_error() const { return name_error_; }

 private:
  const RedisEndpoint endpoint_;
  const Options options_;
  const bool has_name_;

  std::vector<std::string> addresses_;          // the known ones; "" for a unix socket
  size_t next_ = 0;                             // index of the next target
  absl::Time name_due_ = absl::InfinitePast();  // with a name: when its next lookup is due
  absl::Status name_error_;
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_SERVER_LOCATOR_H_
