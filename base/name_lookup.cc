#include "base/name_lookup.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/detached_thread.h"
#include "base/host_addresses.h"
#include "base/unique_fd.h"
#include "glog/logging.h"

namespace ddp {
struct NameLookup::State {
  UniqueFd event;
  absl::StatusOr<std::vector<std::string>> result;  // written by the thread until `done`
  std::atomic<bool> done = false;
};

NameLookup::NameLookup(std::shared_ptr<State> state) : state_(std::move(state)) {}
NameLookup::~NameLookup() = default;

absl::StatusOr<std::unique_ptr<NameLookup>> NameLookup::Start(const std::string& host) {
  return Start([host] { return NumericAddressesOf(host); });
}

absl::StatusOr<std::unique_ptr<NameLookup>> NameLookup::Start(Look look) {
  auto state = std::make_shared<State>();
  state->event.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!state->event.valid()) {
    return absl::ResourceExhaustedError("the lookup of a name: no descriptor");
  }
  const absl::Status started = StartDetachedThread("name-lookup", [state, look = std::move(look)] {
    state->result = look();
    state->done.store(true, std::memory_order_release);
    const uint64_t one = 1;
    (void)!write(state->event.get(), &one, sizeof(one));
  });
  if (!started.ok()) {
    return absl::ResourceExhaustedError(absl::StrCat("the lookup of a name: ", started.message()));
  }
  return std::unique_ptr<NameLookup>(new NameLookup(std::move(state)));
}

int NameLookup::fd() const { return state_->event.get(); }

bool NameLookup::done() const { return state_->done.load(std::memory_order_acquire); }

absl::StatusOr<std::vector<std::string>> NameLookup::Result() const {
  CHECK(done()) << "the answer is not there yet";
  return state_->result;
}

bool IsNumericAddress(const std::string& host) {
  in6_addr address{};
  return inet_pton(AF_INET, host.c_str(), &address) == 1 ||
         inet_pton(AF_INET6, host.c_str(), &address) == 1;
}

}  // namespace ddp
