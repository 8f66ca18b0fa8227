#ifndef DDP_STORE_TCP_STORE_TCP_STORE_STATE_H_
#define DDP_STORE_TCP_STORE_TCP_STORE_STATE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "store/tcp_store/tcp_store_protocol.h"

namespace ddp::store {

// The data of a TCPStore server: keys, queues, and the clients that wait for them. Requests in,
// replies out; no socket, no clock.
//
// A wait ends at the moment when all its keys are present at once. A key is present when it has a
// value or when the queue of its name has elements. A pushed element ends only one of the waits for
// its queue alone, the oldest, because one client can pop it. The element is then promised to that
// client. If the client's next request does not pop it, or the client disconnects, the next wait
// ends.
//
// Thread-compatible.
class TcpStoreState {
 public:
  using ClientId = uint64_t;

  // Bytes for one client, to be sent after all its earlier replies.
  struct Reply {
    ClientId client;
    std::string bytes;
  };
  using Replies = std::vector<Reply>;

  // `limits` is not owned and must outlive the state.
  explicit TcpStoreState(const TcpStoreLimits* limits);

  // Connect() adds a client, whose `id` was never used before. Disconnect() removes a client, and
  // appends the replies to other clients whose waits end.
  void Connect(ClientId id);
  void Disconnect(ClientId id, Replies& replies);

  // Applies the request and appends the replies that follow: to the client, and to other clients
  // whose waits end. On an error nothing was applied, and the caller must disconnect the client.
  //
  // kInvalidArgument: the first request is not a correct validation, or a later one is a
  // validation; an add to a value that is not a number. Also: an add whose sum exceeds 64 bits; a
  // second wait during the first. kResourceExhausted: a value, a reply or the whole store would
  // exceed the limits. The messages name the key, where one key is at fault.
  absl::Status Handle(ClientId id, TcpStoreRequest request, Replies& replies);

  // Returns true when the client has sent a correct validation.
  bool IsValidated(ClientId id) const;

  // Sets a value, as a client's set does.
  void Set(const std::string& key, std::string value, Replies& replies);

  // Returns the bytes of keys, values, elements and waits.
  size_t stored_bytes() const { return stored_bytes_; }

 private:
  // Waits by their number, so the oldest is first.
  using Waiters = std::map<uint64_t, ClientId>;

  struct Client {
    bool validated = false;
    uint64_t wait = 0;  // its number; 0: no wait
    absl::flat_hash_set<std::string> awaited;
    size_t missing = 0;   // number of awaited keys that are not present
    std::string promise;  // the queue of which an element is promised to the client
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
  // Called when a key has become present, and when it has ceased to be.
  void Appeared(const std::string& key, Replies& replies);
  void Disappeared(const std::string& key);
  // Ends the waits for `key` of which no key is missing, except those that only OfferElements()
  // ends.
  void EndFulfilledWaits(const std::string& key, Replies& replies);
  void EndWait(Client& client);
  // Ends as many waits for this queue alone as it has elements that are not promised.
  void OfferElements(const std::string& key, Replies& replies);
  // Called after the next request, or the end, of a client with a promised element.
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

#endif  // DDP_STORE_TCP_STORE_TCP_STORE_STATE_H_
