// The only file that includes ProcessGroupGloo.hpp. Gloo's headers here are our own stand-ins, so
// no inline function compiled from them may be visible outside (see the target's copts).
#include "ddp/comm/backend/gloo_backend.h"

#include <signal.h>

#include <chrono>
#include <cstdlib>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ddp/common/error.h"

namespace ddp::internal {
namespace {

// Ignores SIGPIPE, unless the program has a handler. Gloo writes to a peer's socket by write(2);
// when the peer is gone, SIGPIPE would kill the process before Gloo sees the error.
void IgnoreBrokenPipes() {
  struct sigaction action {};
  if (::sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) {
    action.sa_handler = SIG_IGN;
    ::sigaction(SIGPIPE, &action, nullptr);
  }
}

// Gives access to the protected counter from which an operation of LibTorch takes its tag.
struct GlooCounter : c10d::ProcessGroupGloo {
  static constexpr uint32_t c10d::ProcessGroupGloo::*kMember = &GlooCounter::collectiveCounter_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> MakeGlooBackend(const c10::intrusive_ptr<c10d::Store>& store,
                                                  const GlooBackendOptions& options) {
  using Gloo = c10d::ProcessGroupGloo;
  IgnoreBrokenPipes();
  const char* const interface = std::getenv("GLOO_SOCKET_IFNAME");
  try {
    auto gloo = Gloo::Options::create(absl::ToChronoMilliseconds(options.timeout));
    if (interface != nullptr && *interface != '\0') {
      for (const auto name : absl::StrSplit(interface, ',', absl::SkipWhitespace())) {
        gloo->devices.push_back(Gloo::createDeviceForInterface(std::string(name)));
      }
    } else if (options.single_host) {
      gloo->devices.push_back(Gloo::createDeviceForHostname("127.0.0.1"));
    } else {
      gloo->devices.push_back(Gloo::createDefaultDevice());
    }
    return c10::make_intrusive<Gloo>(store, options.rank, options.size, gloo);
  } catch (const c10::Error& error) {
    throw CommunicationError(
        absl::StrCat("rank ", options.rank, " of ", options.size,
                     ": Gloo could not connect the ranks: ", error.what_without_backtrace()));
  } catch (const std::exception& error) {
    throw CommunicationError(absl::StrCat("rank ", options.rank, " of ", options.size,
                                          ": Gloo could not connect the ranks: ", error.what()));
  }
}

bool IsGloo(const c10d::Backend& backend) {
  return dynamic_cast<const c10d::ProcessGroupGloo*>(&backend) != nullptr;
}

void SetNextGlooTag(c10d::Backend& backend, uint32_t tag) {
  static_cast<c10d::ProcessGroupGloo&>(backend).*GlooCounter::kMember = tag;
}

}  // namespace ddp::internal
