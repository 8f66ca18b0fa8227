#include "ddp/comm/backend/eager_connect.h"

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "ddp/common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// A backend whose ranks connect as the test says.
class ConnectingBackend final : public c10d::Backend {
 public:
  explicit ConnectingBackend(std::function<void()> connect)
      : Backend(0, 2), connect_(std::move(connect)) {}
  const std::string getBackendName() const override { return "connecting"; }
  void eagerConnectSingleDevice(at::Device device) override {
    connected_to = device;
    connect_();
  }
  std::optional<at::Device> connected_to;

 private:
  const std::function<void()> connect_;
};

std::string ErrorOf(const c10::intrusive_ptr<ConnectingBackend>& backend, absl::Duration timeout) {
  try {
    ConnectEagerly(backend, at::Device(at::kCPU, 0), timeout, "rank 0 of 2: NCCL");
  } catch (const CommunicationError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(EagerConnectTest, BindsTheDeviceAndConnects) {
  const auto backend = c10::make_intrusive<ConnectingBackend>([] {});
  EXPECT_EQ(ErrorOf(backend, absl::InfiniteDuration()), "no error");
  EXPECT_EQ(backend->connected_to, at::Device(at::kCPU, 0));
  EXPECT_EQ(backend->getBoundDeviceId(), at::Device(at::kCPU, 0));
  EXPECT_EQ(backend.use_count(), 1);
}

TEST(EagerConnectTest, ARankThatNeverComesEndsItAtTheTimeout) {
  const auto never = std::make_shared<std::promise<void>>();
  std::future<void> comes = never->get_future();
  std::promise<void> left;
  const auto backend = c10::make_intrusive<ConnectingBackend>([&] {
    comes.wait();
    left.set_value();
  });
  EXPECT_THAT(ErrorOf(backend, absl::Milliseconds(20)),
              AllOf(StartsWith("rank 0 of 2: NCCL: the ranks were not connected within 20ms"),
                    HasSubstr("a rank has not come")));
  never->set_value();  // the thread still has the backend
  left.get_future().wait();
}

TEST(EagerConnectTest, AnErrorOfTheBackendIsNamed) {
  const auto backend = c10::make_intrusive<ConnectingBackend>(
      [] { throw std::runtime_error("no network interface"); });
  EXPECT_EQ(ErrorOf(backend, absl::Minutes(1)), "rank 0 of 2: NCCL: no network interface");
}

}  // namespace
}  // namespace ddp::internal
