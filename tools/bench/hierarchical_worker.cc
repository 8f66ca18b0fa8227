// A rank of the report's section hosts (reporting/group_sections.py): sums a tensor over all ranks
// with several backends in turn. Also a rank of the section peer_death, where all ranks are on one
// host and one of them is killed.
//
// The ranks find each other by the environment, as under torchrun. With MASTER_PORT=0, rank 0 binds
// a free port and prints it; the other ranks are then started with that port. Each rank prints a
// line of JSON for each sum: the backend, the seconds of the sum, and the bytes that the host sent
// and received over its link in the meantime.
//
// With --until_failure the ranks sum with the first backend until one rank is killed. A rank prints
// a line after its first sum. When a rank is killed, each of the others prints the rank that its
// error names, and when the error came (CLOCK_MONOTONIC). A rank then lives until the end of its
// standard input: rank 0 serves the store, and the others may still read their news there.
#include <gflags/gflags.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "ddp/ddp.h"
#include "nlohmann/json.hpp"

DEFINE_string(backends, "gloo,hierarchical",
              "to take turns; \"hosts\" is hierarchical with "
              "deterministic=false");
DEFINE_int64(elements, 25 << 18, "float numbers of the tensor");
DEFINE_int32(rounds, 5, "sums of each backend");
DEFINE_string(link, "eth0", "the network interface whose bytes are counted");
DEFINE_bool(until_failure, false, "go on until a rank is killed");
DEFINE_int32(patience_seconds, 300, "with until_failure: fail when no rank is killed in this time");
DEFINE_int64(ballast_mib, 0,
             "with until_failure: memory that this rank fills, and that the "
             "kernel frees when the rank is killed");

namespace ddp {
namespace {

void Print(const nlohmann::json& line) { std::cout << line << std::endl; }

struct Traffic {
  int64_t received = 0;
  int64_t sent = 0;
};

// Reads what the kernel has counted on the link. /sys may show another network namespace.
Traffic TrafficNow() {
  std::ifstream file("/proc/self/net/dev");
  std::string line;
  while (std::getline(file, line)) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || line.find(FLAGS_link) >= colon) continue;
    std::istringstream numbers(line.substr(colon + 1));
    Traffic traffic;
    int64_t other = 0;
    numbers >> traffic.received;
    for (int i = 0; i < 7; ++i) numbers >> other;
    numbers >> traffic.sent;
    return traffic;
  }
  return {};
}

int Number(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? 0 : std::atoi(text);
}

struct Contestant {
  std::string name;
  std::unique_ptr<ProcessGroup> group;
};

std::vector<Contestant> Connect() {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(Number("MASTER_PORT"));
  options.isServer = Number("RANK") == 0;
  const auto store = c10::make_intrusive<c10d::TCPStore>(std::getenv("MASTER_ADDR"), options);
  if (options.port == 0) Print({{"port", store->getPort()}});
  std::vector<Contestant> contestants;
  for (const auto part : absl::StrSplit(FLAGS_backends, ',')) {
    const std::string name(part);
    const ProcessGroup::Place place{.rank = Number("RANK"),
                                    .size = Number("WORLD_SIZE"),
                                    .local_rank = Number("LOCAL_RANK"),
                                    .local_size = Number("LOCAL_WORLD_SIZE"),
                                    .store_is_rank_0 = true};
    contestants.push_back(
        {.name = name,
         .group = std::make_unique<ProcessGroup>(
             c10::make_intrusive<c10d::PrefixStore>(name, store), place,
             ProcessGroupOptions{.backend = name == "hosts" ? "hierarchical" : name,
                                 .deterministic = name != "hosts"})});
  }
  return contestants;
}

void Measure(const Contestant& contestant, ProcessGroup& referee, const torch::Tensor& tensor) {
  tensor.fill_(contestant.group->rank() + 1);
  referee.barrier();
  const Traffic before = TrafficNow();
  const int64_t start_ns = MonotonicNanoseconds();
  contestant.group->all_reduce(tensor);
  const int64_t end_ns = MonotonicNanoseconds();
  referee.barrier();
  const Traffic after = TrafficNow();
  const int size = contestant.group->size();
  TORCH_CHECK(tensor.eq(size * (size + 1) / 2).all().item<bool>(), "a wrong sum");
  Print({{"backend", contestant.name},
         {"seconds", static_cast<double>(end_ns - start_ns) / 1e9},
         {"sent", after.sent - before.sent},
         {"received", after.received - before.received}});
}

// Returns after the error. Throws when no error comes in time.
void SumUntilFailure(ProcessGroup& group, const torch::Tensor& tensor) {
  const int64_t end_ns = MonotonicNanoseconds() + FLAGS_patience_seconds * int64_t{1'000'000'000};
  try {
    group.all_reduce(tensor);
    Print({{"running", group.rank()}});
    while (MonotonicNanoseconds() < end_ns) group.all_reduce(tensor);
  } catch (const PeerFailedError& error) {
    Print({{"failed_ns", MonotonicNanoseconds()}, {"rank", error.rank()}});
    return;
  } catch (const CommunicationError& error) {
    Print({{"failed_ns", MonotonicNanoseconds()}, {"rank", -1}});
    std::cerr << error.what_without_backtrace() << std::endl;
    return;
  }
  TORCH_CHECK(false, "no rank was killed in ", FLAGS_patience_seconds, " s");
}

void Run() {
  const std::vector<Contestant> contestants = Connect();
  const torch::Tensor tensor = torch::zeros({FLAGS_elements});
  ProcessGroup& referee = *contestants.front().group;
  if (FLAGS_until_failure) {
    const torch::Tensor ballast = torch::ones({FLAGS_ballast_mib << 18});
    SumUntilFailure(referee, tensor);
    std::cin.ignore(std::numeric_limits<std::streamsize>::max());
    return;
  }
  for (int round = 0; round < FLAGS_rounds; ++round) {
    for (const Contestant& contestant : contestants) Measure(contestant, referee, tensor);
  }
  referee.barrier();
}

}  // namespace
}  // namespace ddp

int main(int argc, char** argv) {
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  ddp::Run();
  return 0;
}
