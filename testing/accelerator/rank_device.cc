// With DDP_TEST_DEVICE=sim, each rank's tensors and groups are on the simulated devices, without a
// word in the test. It acts in a rank, before the rank's body. A backend
// that the test names is the simulated one too.
// RuntimeOptions has further variables; the seed is also that of --runs_per_test.
#include <cstdlib>
#include <string>

#include <glog/logging.h>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "base/environment.h"
#include "ddp/register_backend.h"
#include "testing/accelerator/accelerator.h"
#include "testing/accelerator/default_device.h"
#include "testing/accelerator/sim_group.h"
#include "testing/ranks/rank_test.h"

namespace ddp::testing {
namespace {

void PrepareRank() {
  const std::string device = EnvironmentVariable("DDP_TEST_DEVICE").value_or("");
  CHECK_EQ(device, "sim") << "DDP_TEST_DEVICE";
  const std::string local_rank = EnvironmentVariable("LOCAL_RANK").value_or("");
  int index = 0;
  CHECK(absl::SimpleAtoi(local_rank, &index)) << "LOCAL_RANK: " << local_rank;
  if (const auto run = EnvironmentVariable("TEST_RANDOM_SEED")) {
    setenv("DDP_SIM_SEED", run->c_str(), /*overwrite=*/0);
  }
  setenv("DDP_SIM_LATENESS_MS", "2", /*overwrite=*/0);
  const absl::StatusOr<RuntimeOptions> options = RuntimeOptionsFromEnvironment();
  CHECK(options.ok()) << options.status();
  InstallAccelerator(*options);
  SetDefaultDevice(SimulatedDevice(index % Runtime::kDevices));
  for (const char* name : {"sim", "gloo", "shm"}) register_backend(name, ConnectSimulatedDevices);
  setenv("DDP_BACKEND", "sim", /*overwrite=*/1);
}

[[maybe_unused]] const bool registered = internal::RegisterDevice(PrepareRank);

}  // namespace
}  // namespace ddp::testing
