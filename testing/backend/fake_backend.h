// A c10d backend of ranks that are threads of one process. A test decides what becomes of each
// operation.
#ifndef DDP_TESTING_BACKEND_FAKE_BACKEND_H_
#define DDP_TESTING_BACKEND_FAKE_BACKEND_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "ddp/process_group.h"

namespace ddp::testing {

// An operation as one rank gives it to its backend.
struct FakeCall {
  enum class Kind : uint8_t {
    kAllReduce,
    kBroadcast,
    kAllGather,
    kReduceScatter,
    kAllToAll,
    kSend,
    kReceive,
  };

  int64_t id = 0;  // different for each call of a network; the order says nothing
  Kind kind = Kind::kAllReduce;
  int rank = 0;
  int64_t incarnation = 0;  // of the group
  // The number of earlier calls of this rank on this backend: collectives, or messages.
  int64_t number = 0;
  int64_t bytes = 0;  // of this rank's input; 0 for a sparse tensor
};

// What happens to one rank's operation. By default it arrives at once, and the rank gets its
// result as soon as the operations of all ranks that the result needs have arrived.
struct FakeFate {
  enum class Hold : uint8_t {
    kNothing,
    kArrival,     // the peers do not see the operation until FakeNetwork::Release()
    kCompletion,  // this rank gets no result until FakeNetwork::Release()
  };

  Hold hold = Hold::kNothing;
  bool lost = false;              // never arrives, and never completes
  std::string launch_error = {};  // the launch throws it, and the operation never arrives
  std::string error = {};         // this rank gets this error in place of its result
};

// Connects ranks that are threads of this process. Each rank has a c10d backend of its own, with
// the name "fake".
//
// Results. The network reduces in rank order, so equal inputs give equal bits on all ranks and in
// every run. Every work has a future. The input is copied at the launch; the output is written when
// the operation completes. A broadcast completes on its root at once, on another rank when that
// rank and the root have come. Each other collective needs all ranks. A message completes on the
// sender at once.
//
// Matching. The n-th collective of one rank meets the n-th of every other rank of the backend. The
// n-th message of a rank to a peer under a tag meets the peer's n-th receive from that rank under
// that tag. Collectives that differ in kind, reduction, type, size or root get no result, as in
// LibTorch's Gloo when tags differ. In a broadcast only the ranks that differ from the root get
// none. A receive of another size than was sent ends with an error.
//
// End. When a backend is destroyed, the operations of its peers that need this rank end with a
// connection error. The network's destructor ends all remaining operations with an error.
//
// Threads. Thread-safe. The script runs on the rank's thread. Futures complete on the thread that
// Options::delivery says; at the end of a backend or of the network perhaps on the thread that
// destroys it. No lock is held in either case.
class FakeNetwork {
 public:
  // Where operations complete, and so where continuations of their futures run.
  enum class Delivery : uint8_t {
    kLastArriver,  // on the thread of the rank that comes last, or of Release(): perhaps in a
                   // launch
    kOwnThread,    // on one thread of the network, one by one
  };

  // Decides about a call. The ranks call it at the same time.
  using Script = std::function<FakeFate(const FakeCall&)>;

  struct Options {
    Script script = nullptr;  // null: the default fate for every call
    Delivery delivery = Delivery::kLastArriver;
  };

  FakeNetwork() : FakeNetwork(Options()) {}
  explicit FakeNetwork(Options options);
  ~FakeNetwork();
  FakeNetwork(const FakeNetwork&) = delete;
  FakeNetwork& operator=(const FakeNetwork&) = delete;

  // Makes the backend of one rank. The ranks of one group and incarnation meet by request.store.
  // Blocks until all of them have come. Throws CommunicationError after request.connect_timeout.
  c10::intrusive_ptr<c10d::Backend> Connect(const BackendRequest& request);

  // Returns Connect() for ProcessGroupOptions::make_backend. The network must outlive the group.
  BackendMaker maker();

  // Blocks until `count` operations are held: arrivals, and completions whose result is ready.
  // Returns all held ones by number, then by rank. Throws std::runtime_error after 60 s.
  std::vector<FakeCall> AwaitHeld(size_t count);

  // Lets a held operation go on. A CHECK fails when it is not held.
  void Release(const FakeCall& call);

  class State;  // shared with the backends

 private:
  const std::shared_ptr<State> state_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_BACKEND_FAKE_BACKEND_H_
