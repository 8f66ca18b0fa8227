#ifndef DDP_STORE_REDIS_SERVER_LOCATOR_H_
#define DDP_STORE_REDIS_SERVER_LOCATOR_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::store {

// Decides where a client looks for its server: at the known addresses, or at those that the
// server's name has now. The lookup of a name may take many seconds in a broken network, so the
// client should not make one for each attempt to connect.
//
// Rules:
//   - The client has not reached the server yet, an attempt has failed, or the server is doubted:
//     the name is due at once, but not sooner than a pause after the last lookup. Each further
//     lookup doubles the pause, from one second to half a minute. While no address is known, the
//     pause stays at one second.
//   - The client has reached the server: the name is not due, and the next pause is short again.
//   - The address that was reached comes first, and the one that was doubted last, also after
//     another lookup. The others keep the name's order.
//   - A numeric address or a unix socket has no name: it is always known, and never due.
//   - Sentinels stand for the name of their master. They answer at once, so the pause stays short.
//
// Pure: events and the time in, decisions out. Thread-compatible.
class ServerLocator {
 public:
  explicit ServerLocator(const RedisEndpoint& endpoint);

  // Events. ---------------------------------------------------------------------------------------

  // The client reached the server at `address`: a numeric address, or "" for a unix socket.
  void Reached(const std::string& address);

  // An attempt at all known addresses failed: the server refused the connection, did not answer, or
  // refused the greeting.
  void Lost() { is_sought_ = true; }

  // The server that was reached last is not the master: it never was, or it has been demoted
  // (READONLY, MASTERDOWN).
  void Doubt();

  // A lookup of the name ended with `addresses`, at least one. They replace the known ones.
  void NameFound(std::vector<std::string> addresses, absl::Time now);

  // A lookup of the name failed.
  void NameFailed(const absl::Status& why, absl::Time now);

  // Decisions. ------------------------------------------------------------------------------------

  bool NameIsDue(absl::Time now) const {
    return has_name_ && is_sought_ && now >= last_lookup_ + pause_;
  }

  bool knows_address() const { return !addresses_.empty(); }

  // Returns the known addresses, in the order in which to try them; "" for a unix socket.
  const std::vector<std::string>& addresses() const { return addresses_; }

  // Returns the error of the last lookup that failed. OK: none has failed.
  const absl::Status& name_error() const { return name_error_; }

 private:
  void NoteLookup(absl::Time now);
  void PutInOrder();

  const bool has_name_;
  const absl::Duration longest_pause_;

  std::vector<std::string> addresses_;
  std::string reached_;  // empty: none
  std::string doubted_;  // empty: none
  bool is_sought_ = true;
  absl::Time last_lookup_ = absl::InfinitePast();
  absl::Duration pause_;  // from the last lookup to the next one
  absl::Status name_error_;
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_SERVER_LOCATOR_H_
