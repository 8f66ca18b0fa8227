#include "ddp/comm/backend/eager_connect.h"

#include <algorithm>
#include <exception>
#include <future>
#include <memory>
#include <utility>

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/strings/str_cat.h"
#include "base/detached_thread.h"
#include "base/duration_text.h"
#include "base/mutex.h"
#include "ddp/common/error.h"

namespace ddp::internal {
namespace {

void Connect(c10d::Backend& backend, at::Device device) {
  const c10::DeviceGuard guard(device);
  backend.setBoundDeviceId(device);  // LibTorch 2.15's NCCL connects here
  backend.eagerConnectSingleDevice(device);
}

}  // namespace

void ConnectEagerly(const c10::intrusive_ptr<c10d::Backend>& backend, at::Device device,
                    absl::Duration timeout, const std::string& about) {
  const auto connect =
      std::make_shared<std::packaged_task<void()>>([kept = backend, device]() mutable {
        Connect(*kept, device);
        kept.reset();  // the caller is the only owner when it goes on
      });
  std::future<void> done = connect->get_future();
  const absl::Status started = StartDetachedThread("ddp-connect", [connect] { (*connect)(); });
  if (!started.ok()) throw CommunicationError(absl::StrCat(about, ": ", started.message()));
  const absl::Duration longest = std::min(timeout, CondVar::kLongestWait);
  if (done.wait_for(absl::ToChronoNanoseconds(longest)) != std::future_status::ready) {
    throw CommunicationError(absl::StrCat(about, ": the ranks were not connected within ",
                                          DurationText(timeout),
                                          ": a rank has not come, or its network is out of reach"));
  }
  try {
    done.get();
  } catch (const std::exception& error) {
    throw CommunicationError(absl::StrCat(about, ": ", MessageOf(error)));
  }
}

}  // namespace ddp::internal
