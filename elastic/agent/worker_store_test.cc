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
#include "store/tcp_store_client.h"
#include "store/tcp_store_server.h"

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

  // What a worker does, while the loop serves it.
  void AsWorker(int port, const std::function<void(store::TcpStoreClient&)>& body) {
    std::thread worker([&] {
      auto client = store::TcpStoreClient::Connect("127.0.0.1", port, kLong);
      EXPECT_TRUE(client.ok()) << client.status();
      if (client.ok()) body(**client);
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

  LaunchConfig config_;
  std::unique_ptr<EventLoop> loop_;
  std::atomic<bool> done_ = false;
};

TEST_F(WorkerStoreTest, EachGenerationHasAStoreWithoutTheKeysOfTheLast) {
  WorkerStore store(config_, loop_.get(), nullptr);
  const absl::StatusOr<int> first = store.Prepare();
  ASSERT_TRUE(first.ok()) << first.status();
  store.Settle(/*serves=*/true);
  AsWorker(*first, [](store::TcpStoreClient& worker) {
    EXPECT_TRUE(worker.Set("/address", "of the first generation", kLong).ok());
    EXPECT_EQ(*worker.Get("/address", kLong), "of the first generation");
  });
  const absl::StatusOr<int> second = store.Prepare();
  ASSERT_TRUE(second.ok()) << second.status();
  AsWorker(*second, [](store::TcpStoreClient& worker) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(worker.Get("/address", kShort).status()));
  });
}

TEST_F(WorkerStoreTest, TheUsersPortStaysAndIsEmptied) {
  {
    WorkerStore any(config_, loop_.get(), nullptr);
    config_.master_port = *any.Prepare();
  }
  WorkerStore store(config_, loop_.get(), nullptr);
  ASSERT_EQ(*store.Prepare(), config_.master_port);
  store.Settle(/*serves=*/true);
  AsWorker(config_.master_port, [](store::TcpStoreClient& worker) {
    EXPECT_TRUE(worker.Set("/address", "of the first generation", kLong).ok());
    EXPECT_TRUE(worker.Get("/address", kLong).ok());
  });
  ASSERT_EQ(*store.Prepare(), config_.master_port);
  AsWorker(config_.master_port, [](store::TcpStoreClient& worker) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(worker.Get("/address", kShort).status()));
  });
}

TEST_F(WorkerStoreTest, ANodeWithoutRankZeroServesNothing) {
  WorkerStore store(config_, loop_.get(), nullptr);
  const absl::StatusOr<int> port = store.Prepare();
  ASSERT_TRUE(port.ok()) << port.status();
  store.Settle(/*serves=*/false);
  // Somebody else may have it.
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
  store.Settle(/*serves=*/false);
  AsWorker((*given)->port(), [](store::TcpStoreClient& late_node) {
    EXPECT_EQ(*late_node.Get("ddprun/place", kLong), "redis://10.0.0.1:7000");
  });
}

}  // namespace
}  // namespace ddp::elastic
