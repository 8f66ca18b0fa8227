#include "ddp/rpc/own_transports.h"

#include "absl/strings/numbers.h"
#include "base/environment.h"
#include "base/process/cpu_quota.h"

namespace ddp::rpc::internal {

std::optional<std::vector<std::string>> OwnTransports(int world_size) {
  int on_host = 0;
  const std::string local = EnvironmentVariable("LOCAL_WORLD_SIZE").value_or("");
  if (!absl::SimpleAtoi(local, &on_host) || on_host < 1) on_host = world_size;
  if (UsableCores() / 2 >= on_host) return std::nullopt;
  return std::vector<std::string>{"uv"};
}

}  // namespace ddp::rpc::internal
