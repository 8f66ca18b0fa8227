// A rank of the report's section on collectives: times collectives on raw c10d backends on request.
// collective_worker_mpi.c is the same on MPI.
//
// The ranks meet through files. The first line on stdout is
//
//   {"version": "...", "backends": {"gloo": ""}, "registers": {"gloo": false}}
//
// where a backend that cannot be made has the reason beside its name. Then requests come on stdin,
// one a line, the same to all ranks:
//
//   time BACKEND COLLECTIVE BYTES MEMORY COUNT   answered by {"start_ns": a, "end_ns": b,
//                                                "cpu_ns": c} of COUNT calls, one after the other
//   check BACKEND COLLECTIVE BYTES MEMORY        answered by {"wrong": n}: elements of one call
//                                                with another value than expected
//
// or by {"error": "..."}. COLLECTIVE is allreduce, broadcast, allgather, reduce_scatter or
// alltoall. BYTES counts the larger of a rank's two tensors, of floats. MEMORY is private or
// registered (made by the backend's allocateTensor). The control is BACKEND memcpy, COLLECTIVE
// copy: every rank copies BYTES from one buffer of its own to another.

#include <gflags/gflags.h>
#include <sched.h>
#include <string.h>
#include <time.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "ddp/comm/backend_factory/backend_factory.h"
#include "nlohmann/json.hpp"
#include "tools/bench/file_barrier.h"

DEFINE_int32(rank, 0, "of this process");
DEFINE_int32(size, 2, "number of ranks");
DEFINE_string(store, "", "an absent file by which the ranks find each other");
DEFINE_string(barrier, "", "a file of 64 zero bytes per rank, for this run alone");
DEFINE_string(backends, "gloo", "to connect, separated by commas; empty: the control alone");
DEFINE_int32(cpu, -1, "on which the calling thread runs; threads of a backend run on any");

namespace ddp {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using Json = nlohmann::json;

constexpr char kRegistered[] = "registered";

struct Request {
  std::string backend, collective, memory;
  int64_t bytes = 0;
};

// The tensors of one call. `input` is the result too where the collective works in place.
struct Call {
  at::Tensor input, output;
  std::function<c10::intrusive_ptr<c10d::Work>()> start;
};

void PinTo(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  TORCH_CHECK(sched_setaffinity(0, sizeof(set), &set) == 0, "cannot run on CPU ", cpu);
}

int64_t ThreadCpuNanoseconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

// Returns what `answer` returns, or the reason of its exception as an error.
Json OrError(const std::function<Json()>& answer) {
  try {
    return answer();
  } catch (const c10::Error& error) {
    return {{"error", error.what_without_backtrace()}};
  } catch (const std::exception& error) {
    return {{"error", error.what()}};
  }
}

// Returns element `first` and the following ones of a rank's input: small integers, so that sums
// are exact in every order.
at::Tensor Pattern(int64_t first, int64_t count, int rank) {
  return (at::arange(first, first + count, at::kInt) * 7 + 13 * rank).remainder(32).to(at::kFloat);
}

// Connects the backends, and makes and times the calls. Used by one thread.
class Collectives {
 public:
  Collectives() : barrier_(FLAGS_barrier, FLAGS_rank, FLAGS_size) {
    for (const auto name : absl::StrSplit(FLAGS_backends, ',', absl::SkipEmpty())) {
      Connect(std::string(name));
    }
  }

  Json Hello() const {
    Json registers = Json::object();
    for (const auto& [name, backend] : backends_) registers[name] = backend->supportsTensorAlloc(0);
    return {
        {"version", "LibTorch " TORCH_VERSION}, {"backends", reasons_}, {"registers", registers}};
  }

  Json Time(const Request& request, int count) {
    std::function<void()> once;
    if (request.backend == "memcpy") {
      const int64_t elements = (request.bytes + 3) / 4;
      once = [from = Buffer(request, 0, elements).data_ptr(),
              to = Buffer(request, 1, elements).data_ptr(), bytes = request.bytes] {
        memcpy(to, from, bytes);
        asm volatile("" : : "r"(to) : "memory");  // the copy is not removed
      };
    } else {
      once = [call = MakeCall(request)] { call.start()->wait(); };
    }
    barrier_.Wait();
    const int64_t cpu = ThreadCpuNanoseconds();
    const int64_t start = MonotonicNanoseconds();
    for (int i = 0; i < count; ++i) once();
    const int64_t end = MonotonicNanoseconds();
    return {{"start_ns", start}, {"end_ns", end}, {"cpu_ns", ThreadCpuNanoseconds() - cpu}};
  }

  Json Check(const Request& request) {
    const Call call = MakeCall(request);
    call.input.copy_(Pattern(0, call.input.numel(), FLAGS_rank));
    call.start()->wait();
    const at::Tensor& found = call.output.defined() ? call.output : call.input;
    const int64_t wrong = found.ne(Expected(request, found.numel())).sum().item<int64_t>();
    call.input.zero_();  // sums of zeros stay finite, however often they are repeated
    return {{"wrong", wrong}};
  }

 private:
  void Connect(const std::string& name) {
    std::string& reason = reasons_[name];
    internal::BackendSite site{
        .store = c10::make_intrusive<c10d::PrefixStore>(
            name, c10::make_intrusive<c10d::FileStore>(FLAGS_store, FLAGS_size)),
        .membership = {.rank = FLAGS_rank, .size = FLAGS_size, .local_rank = FLAGS_rank},
        .timeout = absl::Minutes(5),
        .connect_timeout = absl::Minutes(1)};
    site.membership.SetLocalRanks(FLAGS_size);
    try {
      const internal::ConnectedBackend connected = internal::MakeFactoryOf(name)->Connect(site);
      TORCH_CHECK(connected.backend, "a group of ", FLAGS_size, " ranks has none");
      backends_[name] = connected.backend;
    } catch (const c10::Error& error) {
      reason = error.what_without_backtrace();
    }
  }

  // Returns the first `elements` of buffer number `which`, which grows as needed and is in memory.
  at::Tensor Buffer(const Request& request, int which, int64_t elements) {
    const bool registered = request.memory == kRegistered;
    at::Tensor& buffer = buffers_[{registered ? request.backend : "", which}];
    if (!buffer.defined() || buffer.numel() < elements) {
      buffer = at::Tensor();  // gives its memory back first
      buffer = registered ? backends_.at(request.backend)->allocateTensor(elements, at::kFloat)
                          : at::empty(elements, at::kFloat);
      buffer.zero_();
    }
    return buffer.narrow(0, 0, elements);
  }

  Call MakeCall(const Request& request) {
    const auto found = backends_.find(request.backend);
    TORCH_CHECK(found != backends_.end(), "no backend ", request.backend);
    const BackendPtr backend = found->second;
    const int64_t chunk = std::max<int64_t>(1, request.bytes / 4 / FLAGS_size);
    const int64_t whole = chunk * FLAGS_size;
    const std::string& collective = request.collective;
    Call call;
    if (collective == "allreduce" || collective == "broadcast") {
      const int64_t elements = std::max<int64_t>(1, request.bytes / 4);
      call.input = Buffer(request, 0, elements);
      call.start = [backend, tensors = std::vector<at::Tensor>{call.input},
                    reduce = collective == "allreduce"]() mutable {
        return reduce ? backend->allreduce(tensors) : backend->broadcast(tensors);
      };
      return call;
    }
    call.input = Buffer(request, 0, collective == "allgather" ? chunk : whole);
    call.output = Buffer(request, 1, collective == "reduce_scatter" ? chunk : whole);
    call.start = [backend, collective, input = call.input, output = call.output]() mutable {
      if (collective == "allgather") return backend->_allgather_base(output, input);
      if (collective == "reduce_scatter") return backend->_reduce_scatter_base(output, input);
      TORCH_CHECK(collective == "alltoall", "no collective ", collective);
      std::vector<int64_t> even;
      return backend->alltoall_base(output, input, even, even);
    };
    return call;
  }

  // Returns the result of a call whose inputs are Pattern(), on this rank.
  static at::Tensor Expected(const Request& request, int64_t elements) {
    const std::string& collective = request.collective;
    if (collective == "broadcast") return Pattern(0, elements, 0);
    const int64_t chunk = elements / FLAGS_size;
    std::vector<at::Tensor> of_rank;
    for (int rank = 0; rank < FLAGS_size; ++rank) {
      if (collective == "allgather") {
        of_rank.push_back(Pattern(0, chunk, rank));
      } else if (collective == "alltoall") {
        of_rank.push_back(Pattern(FLAGS_rank * chunk, chunk, rank));
      } else {
        const int64_t first = collective == "reduce_scatter" ? FLAGS_rank * elements : 0;
        of_rank.push_back(Pattern(first, elements, rank));
      }
    }
    const bool moved = collective == "allgather" || collective == "alltoall";
    return moved ? at::cat(of_rank) : at::stack(of_rank).sum(0);
  }

  FileBarrier barrier_;
  std::map<std::string, std::string> reasons_;  // "" of a backend that was made
  std::map<std::string, BackendPtr> backends_;
  std::map<std::pair<std::string, int>, at::Tensor> buffers_;
};

int Serve() {
  torch::set_num_threads(1);
  Collectives collectives;
  // Threads that a backend has started keep the process's own CPUs: a thread of Gloo that shares
  // one CPU with its caller would take milliseconds for each call.
  if (FLAGS_cpu >= 0) PinTo(FLAGS_cpu);
  std::cout << collectives.Hello() << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string verb;
    Request request;
    int count = 0;
    words >> verb >> request.backend >> request.collective >> request.bytes >> request.memory;
    words >> count;
    std::cout << OrError([&] {
      TORCH_CHECK(request.bytes > 0, "no such request: ", line);
      if (verb == "check") return collectives.Check(request);
      TORCH_CHECK(verb == "time" && count > 0, "no such request: ", line);
      return collectives.Time(request, count);
    }) << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace ddp

int main(int argc, char** argv) {
  gflags::SetUsageMessage("one rank of the collectives in tools/bench/report");
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  return ddp::Serve();
}
