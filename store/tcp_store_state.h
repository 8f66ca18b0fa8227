#ifndef DDP_STORE_TCP_STORE_STATE_H_
#define DDP_STORE_TCP_STORE_STATE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "store/tcp_store_protocol.h"

namespace ddp::store {

// What a TCPStore server knows and answers: keys, queues, and who waits for which of them. Requests
// in, replies out; no socket, no clock.
//
// A wait is over at the moment when all its keys are there at once. A key is there when it has a
// value or a queue of its name has elements. An element that is pushed ends one wait for its queue
// alone, the oldest, because one client can pop it; should that client do something else, or go,
// the next one gets its chance.
//
// Thread-compatible.
class TcpStoreState {
 public:
  using ClientId = uint64_t;

  // Bytes for one client, to be sent after those that were told before.
  struct Reply {
    ClientId client;
    std::string bytes;
  };
  using Replies = std::vector<Reply>;

  // `limits` is not owned and must outlive the state.
  explicit TcpStoreState(const TcpStoreLimits* limits);

  // A client is known from Connect() to Disconnect(). `id` was never used before.
  void Connect(ClientId id);
  void Disconnect(ClientId id, Replies& replies);

  // Applies the request and appends what follows from it: the client's reply, and others' waits
  // that are over. On an error nothing was applied, and the client is to be disconnected.
  //
  // kInvalidArgument: no validation before the first request, or a wrong one; a number added to
  // what is none, or beyond 64 bits; a second wait during the first. kResourceExhausted: a value, a
  // reply or the whole store would be larger than the limits say. The texts name the key.
  absl::Status Handle(ClientId id, TcpStoreRequest request, Replies& replies);

  // Whether the client has shown that it speaks the protocol.
  bool IsValidated(ClientId id) const;

  // As a client's set.
  void Set(const std::string& key, std::string value, Replies& replies);

  // Keys, values, elements and waits.
  size_t stored_bytes() const { return stored_bytes_; }

 private:
  // Waits by age.
  using Waiters = std::map<uint64_t, ClientId>;

  struct Client {
    bool validated = false;
    uint64_t wait = 0;  // its number; 0: does not wait
    absl::flat_hash_set<std::string> awaited;
    size_t missing = 0;   // of those awaited
    std::string promise;  // the queue of which it was told that an element is there
    bool is_promised = false;
  };

  absl::Status HandleValidated(Client& client, ClientId id, TcpStoreRequest& request,
                               Replies& replies);
  absl::Status CheckRoom(const TcpStoreRequest& request) const;
  absl::Status Write(TcpStoreRequest& request, Replies& replies);
  absl::Status Add(ClientId id, const TcpStoreRequest& request, Replies& replies);
  void CompareSet(ClientId id, TcpStoreRequest& request, Replies& replies);
  absl::Status MultiGet(const TcpStoreRequest& request, std::string& reply) const;
  absl::Status ListKeys(std::string& reply) const;
  bool Delete(const std::string& key);
  void Push(const std::string& key, std::string value, Replies& replies);
  void Pop(const std::string& key, std::string& reply);
  absl::Status Wait(Client& client, ClientId id, TcpStoreRequest& request, Replies& replies);

  bool IsThere(const std::string& key) const;
  // A key that was not there is now, or the other way round.
  void Appeared(const std::string& key, Replies& replies);
  void Disappeared(const std::string& key);
  // Those for `key` of which nothing is missing, but for those that wait for an element.
  void EndFulfilledWaits(const std::string& key, Replies& replies);
  void EndWait(Client& client);
  // Ends as many waits for this queue alone as it has elements that nobody was promised.
  void OfferElements(const std::string& key, Replies& replies);
  // The client did something after it was promised an element.
  void EndPromise(Client& client, Replies& replies);

  const TcpStoreLimits* const limits_;
  absl::flat_hash_map<std::string, std::string> values_;
  absl::flat_hash_map<std::string, std::deque<std::string>> queues_;  // none is empty
  absl::flat_hash_map<std::string, Waiters> waiters_;                 // none is empty
  absl::flat_hash_map<std::string, size_t> promises_;                 // by queue; none is 0
  absl::flat_hash_map<ClientId, Client> clients_;
  uint64_t next_wait_ = 1;
  size_t stored_bytes_ = 0;
};

}  // namespace ddp::store

#endif  // DDP_STORE_TCP_STORE_STATE_H_
