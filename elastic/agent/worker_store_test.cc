#include "elastic/agent/worker_store.h"

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "elastic/agent/launch_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "store/tcp_store/tcp_store_client.h"
#include "store/tcp_store/tcp_store_server.h"

namespace ddp::elastic {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(30);
constexpr absl::Duration kShort = absl::Milliseconds(50);

class WorkerStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<EventLoop>> loop = EventLoop::Create();
    ASSERT_TRUE(loop.ok()) << loop.status();
    loop_ = *std::move(loop);
  }

  // Runs `body` as a worker, on a thread, while the loop serves it.
  void AsWorker(int port, const std::function<void(store::TcpStoreClient&)>& body) {
    Beside([&] {
      auto client = store::TcpStoreClient::Connect("127.0.0.1", port, kLong);
      EXPECT_TRUE(client.ok()) << client.status();
      if (client.ok()) body(**client);
    });
  }

  void Beside(const std::function<void()>& body) {
    std::thread worker([&] {
      body();
      done_.store(true);
    });
    StopOnceDone();
    ASSERT_TRUE(loop_->Run().ok());
    worker.join();
    done_.store(false);
  }

  void StopOnceDone() {
    loop_->AddTimer(absl::Milliseconds(1), [this] {
      if (done_.load()) return loop_->Stop();
      StopOnceDone();
    });
  }

  int FreePort() {
    WorkerStore any(config_, loop_.get(), nullptr);
    return *any.Prepare();
  }

  LaunchConfig config_;
  std::unique_ptr<EventLoop> loop_;
  std::atomic<bool> done_ = false;
};

TEST_F(WorkerStoreTest, EachGenerationHasAStoreWithoutTheKeysOfTheLast) {
  WorkerStore store(config_, loop_.get(), nullptr);
  const absl::StatusOr<int> first = store.Prepare();
  ASSERT_TRUE(first.ok()) << first.status();
  store.Serve(/*serves=*/true);
  AsWorker(*first, [](store::TcpStoreClient& worker) {
    EXPECT_TRUE(worker.Set("/address", "of the first generation", kLong).ok());
    EXPECT_EQ(*worker.Get("/address", kLong), "of the first generation");
  });
  const absl::StatusOr<int> second = store.Prepare();
  ASSERT_TRUE(second.ok()) << second.status();
  store.Serve(/*serves=*/true);
  AsWorker(*second, [](store::TcpStoreClient& worker) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(worker.Get("/address", kShort).status()));
  });
}

TEST_F(WorkerStoreTest, TheUsersPortStaysAndIsEmptied) {
  config_.master_port = FreePort();
  WorkerStore store(config_, loop_.get(), nullptr);
  ASSERT_EQ(*store.Prepare(), config_.master_port);
  store.Serve(/*serves=*/true);
  AsWorker(config_.master_port, [](store::TcpStoreClient& worker) {
    EXPECT_TRUE(worker.Set("/address", "of the first generation", kLong).ok());
    EXPECT_TRUE(worker.Get("/address", kLong).ok());
  });
  ASSERT_EQ(*store.Prepare(), config_.master_port);
  store.Serve(/*serves=*/true);
  AsWorker(config_.master_port, [](store::TcpStoreClient& worker) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(worker.Get("/address", kShort).status()));
  });
}

// The worker is on another node, whose agent has not joined yet; it may be starting all along.
TEST_F(WorkerStoreTest, AWorkerThatDiesWhileTheNextRoundFormsLeavesNoKeyAtTheUsersPort) {
  config_.master_port = FreePort();
  WorkerStore store(config_, loop_.get(), nullptr);
  ASSERT_TRUE(store.Prepare().ok());
  store.Serve(/*serves=*/true);
  ASSERT_TRUE(store.Prepare().ok());
  AsWorker(config_.master_port, [](store::TcpStoreClient& dying) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(dying.Set("/address", "of a dead worker", kShort)));
  });
  store.Serve(/*serves=*/true);
  AsWorker(config_.master_port, [](store::TcpStoreClient& worker) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(worker.Get("/address", kShort).status()));
    EXPECT_TRUE(worker.Set("/address", "mine", kLong).ok());
  });
}

// A node that drains faster than the others joins while their workers save a checkpoint.
TEST_F(WorkerStoreTest, WorkersOfTheEndingGenerationKeepTheirStoreUntilTheNextIsComplete) {
  for (const int port : {0, FreePort()}) {
    config_.master_port = port;
    WorkerStore store(config_, loop_.get(), nullptr);
    const int old_port = *store.Prepare();
    store.Serve(/*serves=*/true);
    std::unique_ptr<store::TcpStoreClient> saving;
    AsWorker(old_port, [&](store::TcpStoreClient&) {
      saving = *store::TcpStoreClient::Connect("127.0.0.1", old_port, kLong);
      EXPECT_TRUE(saving->Set("/saved/0", "done", kLong).ok());
    });
    const int new_port = *store.Prepare();
    EXPECT_EQ(new_port == old_port, port != 0);
    Beside([&] {
      EXPECT_TRUE(saving->Set("/saved/1", "done", kLong).ok());
      EXPECT_EQ(*saving->Get("/saved/0", kLong), "done");
    });
    store.Serve(/*serves=*/true);
    EXPECT_TRUE(absl::IsUnavailable(saving->Get("/saved/0", kLong).status()));
  }
}

TEST_F(WorkerStoreTest, ANodeWithoutRankZeroServesNothing) {
  WorkerStore store(config_, loop_.get(), nullptr);
  const absl::StatusOr<int> port = store.Prepare();
  ASSERT_TRUE(port.ok()) << port.status();
  store.Serve(/*serves=*/false);
  // Another process may bind the port now.
  EXPECT_TRUE(store::TcpStoreServer::Listen(loop_.get(), "127.0.0.1", *port).ok());
}

TEST_F(WorkerStoreTest, APortThatIsTakenIsNamedWithItsFlag) {
  auto other = store::TcpStoreServer::Listen(loop_.get(), "127.0.0.1", 0);
  ASSERT_TRUE(other.ok()) << other.status();
  config_.master_port = (*other)->port();
  WorkerStore store(config_, loop_.get(), nullptr);
  const absl::Status status = store.Prepare().status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("--master-port=" + std::to_string(config_.master_port)));
}

TEST_F(WorkerStoreTest, AGivenServerIsUsedAndKeepsWhatItPublishes) {
  auto given = store::TcpStoreServer::Listen(loop_.get(), "127.0.0.1", 0);
  ASSERT_TRUE(given.ok()) << given.status();
  (*given)->Publish("ddprun/place", "redis://10.0.0.1:7000");
  WorkerStore store(config_, loop_.get(), given->get());
  EXPECT_EQ(*store.Prepare(), (*given)->port());
  store.Serve(/*serves=*/false);
  AsWorker((*given)->port(), [](store::TcpStoreClient& late_node) {
    EXPECT_EQ(*late_node.Get("ddprun/place", kLong), "redis://10.0.0.1:7000");
  });
}

}  // namespace
}  // namespace ddp::elastic
