#include "testing/accelerator/peer_sockets.h"

#include <future>
#include <map>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "gtest/gtest.h"

namespace ddp::testing {
namespace {

class MemoryStore {
 public:
  PeerSockets::Store Interface() {
    return {.set =
                [this](const std::string& key, const std::string& value) {
                  MutexLock lock(mutex_);
                  values_[key] = value;
                  changed_.NotifyAll();
                },
            .get =
                [this](const std::string& key) {
                  MutexLock lock(mutex_);
                  while (!values_.contains(key)) changed_.WaitFor(mutex_, absl::Seconds(60));
                  return values_[key];
                }};
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
};

std::vector<PeerSockets> ConnectAll(int size) {
  MemoryStore store;
  std::vector<std::future<absl::StatusOr<PeerSockets>>> connecting;
  for (int rank = 0; rank < size; ++rank) {
    connecting.push_back(std::async(std::launch::async, [&store, rank, size] {
      return PeerSockets::Connect({.rank = rank, .size = size}, store.Interface(), "peers/",
                                  absl::Seconds(60));
    }));
  }
  std::vector<PeerSockets> ranks;
  for (auto& rank : connecting) ranks.push_back(*rank.get());
  return ranks;
}

// Sends `text` to the other of two ranks, and returns what the other one sends: as many bytes.
absl::StatusOr<std::string> Swap(PeerSockets& sockets, int rank, const std::string& text,
                                 uint64_t tag = 1, absl::Time deadline = absl::InfiniteFuture()) {
  std::string received(text.size(), ' ');
  PeerSockets::Outgoing outgoing(2);
  PeerSockets::Incoming incoming(2);
  outgoing[1 - rank] = absl::MakeConstSpan(text);
  incoming[1 - rank] = absl::MakeSpan(received);
  const absl::Status status = sockets.Exchange(tag, outgoing, incoming, deadline);
  if (!status.ok()) return status;
  return received;
}

TEST(PeerSocketsTest, AllRanksSwapMessagesThatFillTheSockets) {
  constexpr int kSize = 3;
  constexpr size_t kBytes = 4 << 20;
  std::vector<PeerSockets> ranks = ConnectAll(kSize);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kSize; ++rank) {
    threads.emplace_back([&ranks, rank] {
      const std::string own(kBytes, static_cast<char>('a' + rank));
      std::vector<std::string> received(kSize, std::string(kBytes, ' '));
      PeerSockets::Incoming incoming;
      for (std::string& message : received) incoming.emplace_back(absl::MakeSpan(message));
      const PeerSockets::Outgoing outgoing(kSize, absl::MakeConstSpan(own));
      EXPECT_TRUE(ranks[rank].Exchange(1, outgoing, incoming).ok());
      for (int peer = 0; peer < kSize; ++peer) {
        const char expected = peer == rank ? ' ' : static_cast<char>('a' + peer);
        EXPECT_EQ(received[peer], std::string(kBytes, expected));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(PeerSocketsTest, NamesARankInAnotherCollective) {
  std::vector<PeerSockets> ranks = ConnectAll(2);
  auto other = std::async(std::launch::async, [&] { return Swap(ranks[1], 1, "b", 2); });
  EXPECT_EQ(Swap(ranks[0], 0, "a", 1).status().message(),
            "rank 1 is in another collective, or its sizes differ");
  EXPECT_EQ(other.get().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(PeerSocketsTest, AnAbortEndsTheExchangeOnBothRanks) {
  std::vector<PeerSockets> ranks = ConnectAll(2);
  // Rank 1 sends nothing, so rank 0 waits.
  auto waiting = std::async(std::launch::async, [&] { return Swap(ranks[0], 0, "a"); });
  ranks[0].Abort();
  EXPECT_FALSE(waiting.get().ok());
  EXPECT_EQ(Swap(ranks[1], 1, "b").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(Swap(ranks[0], 0, "a").ok());
}

TEST(PeerSocketsTest, APeerThatEndsIsUnavailable) {
  std::vector<PeerSockets> ranks = ConnectAll(2);
  ranks.pop_back();
  EXPECT_EQ(Swap(ranks[0], 0, "a").status().message(), "rank 1 has closed the connection");
}

TEST(PeerSocketsTest, TheDeadlineEndsTheExchange) {
  std::vector<PeerSockets> ranks = ConnectAll(2);
  EXPECT_EQ(Swap(ranks[0], 0, "a", 1, absl::InfinitePast()).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  MemoryStore store;
  EXPECT_EQ(PeerSockets::Connect({.rank = 0, .size = 2}, store.Interface(), "", absl::Duration())
                .status()
                .code(),
            absl::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace ddp::testing
