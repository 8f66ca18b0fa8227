#include "testing/shared_memory/stage_member.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include <glog/logging.h>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "ddp/comm/arena/arena.h"
#include "ddp/comm/host_group/group_entry.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/comm/kernels/reduce.h"
#include "ddp/comm/shared_memory/collective_engine.h"

namespace ddp::internal {
namespace {

using Kind = CollectiveRequest::Kind;

constexpr absl::Duration kTimeout = absl::Minutes(5);  // longer than the test waits
constexpr size_t kInArena = size_t{256} << 10;         // floats

// Small whole numbers, so that every sum is exact.
float Value(int member, size_t i, uint32_t operation) {
  return static_cast<float>((member * 31 + i * 7 + operation * 13) % 101);
}

// One member of one group.
class Member {
 public:
  Member(std::shared_ptr<HostGroup> group, float* block)
      : group_(std::move(group)),
        engine_(std::make_unique<CollectiveEngine>(group_.get())),
        block_(block) {}

  HostGroup::End end() const { return group_->end(); }

  absl::Status Barrier() { return Run({.kind = Kind::kBarrier}); }

  // Runs collective number `operation`, which all members draw in the same way. Counts a result
  // that is wrong.
  absl::Status RunRandom(std::mt19937_64& random, uint32_t operation,
                         std::atomic<uint32_t>& corrupt) {
    const auto kind = random() % 6;
    const size_t count = kind == 1 ? 50'000 + random() % 300'000 : 1 + random() % 3'000;
    bool right = true;
    absl::Status status;
    if (kind <= 1) {
      std::vector<float> values(count);
      status = AllReduce(values, operation, right);
    } else if (kind == 2) {
      status = AllReduce(std::span(block_, kInArena), operation, right);
    } else if (kind == 3) {
      status = AllGather(count, operation, right);
    } else if (kind == 4) {
      status = Broadcast(count * 20, static_cast<int>(operation % size()), operation, right);
    } else {
      status = Ring(count * 10, operation, right);
    }
    if (status.ok() && !right) corrupt.fetch_add(1);
    return status;
  }

 private:
  int size() const { return group_->size(); }
  int me() const { return group_->member(); }

  absl::Status Run(CollectiveRequest request) {
    return Await([&](CollectiveEngine::Done done) {
      engine_->Start(std::move(request), kTimeout, std::move(done));
    });
  }

  // Starts one operation, and drives the engine to its end.
  absl::Status Await(const std::function<void(CollectiveEngine::Done)>& start) {
    std::atomic<bool> done = false;
    absl::Status result;
    start([&](const absl::Status& status) {
      result = status;
      done = true;
    });
    engine_->Drive([&] { return done.load(); }, MonotonicClock().Now() + 2 * kTimeout);
    CHECK(done);
    return result;
  }

  absl::Status AllReduce(std::span<float> values, uint32_t operation, bool& right) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = Value(me(), i, operation);
    const absl::Status status = Run({.kind = Kind::kAllReduce,
                                     .type = ElementType::kFloat,
                                     .elements = values.size(),
                                     .inputs = {std::as_bytes(values)},
                                     .outputs = {std::as_writable_bytes(values)}});
    for (size_t i = 0; status.ok() && i < values.size(); i += 1 + values.size() / 5'000) {
      float sum = 0;
      for (int member = 0; member < size(); ++member) sum += Value(member, i, operation);
      right = right && values[i] == sum;
    }
    return status;
  }

  absl::Status AllGather(size_t count, uint32_t operation, bool& right) {
    std::vector<float> mine(count);
    std::vector<std::vector<float>> all(size(), std::vector<float>(count));
    for (size_t i = 0; i < count; ++i) mine[i] = Value(me(), i, operation);
    CollectiveRequest request{.kind = Kind::kAllGather,
                              .elements = count * sizeof(float),
                              .inputs = {std::as_bytes(std::span(mine))}};
    for (auto& part : all) request.outputs.push_back(std::as_writable_bytes(std::span(part)));
    const absl::Status status = Run(std::move(request));
    for (int member = 0; status.ok() && member < size(); ++member) {
      for (size_t i = 0; i < count; ++i) {
        right = right && all[member][i] == Value(member, i, operation);
      }
    }
    return status;
  }

  absl::Status Broadcast(size_t count, int root, uint32_t operation, bool& right) {
    std::vector<float> values(count, -1);
    CollectiveRequest request{
        .kind = Kind::kBroadcast, .root = root, .elements = count * sizeof(float)};
    if (me() == root) {
      for (size_t i = 0; i < count; ++i) values[i] = Value(root, i, operation);
      request.inputs = {std::as_bytes(std::span(values))};
    } else {
      request.outputs = {std::as_writable_bytes(std::span(values))};
    }
    const absl::Status status = Run(std::move(request));
    for (size_t i = 0; status.ok() && i < count; i += 1 + count / 5'000) {
      right = right && values[i] == Value(root, i, operation);
    }
    return status;
  }

  // Each member sends to the next one.
  absl::Status Ring(size_t count, uint32_t operation, bool& right) {
    const int from = (me() + size() - 1) % size();
    std::vector<float> sent(count);
    std::vector<float> got(count);
    for (size_t i = 0; i < count; ++i) sent[i] = Value(me(), i, operation);
    absl::Status sending;
    std::atomic<bool> is_sent = false;
    engine_->Send((me() + 1) % size(), operation, std::as_bytes(std::span(sent)), kTimeout,
                  [&](const absl::Status& status) {
                    sending = status;
                    is_sent = true;
                  });
    absl::Status receiving = Await([&](CollectiveEngine::Done done) {
      engine_->Receive(from, operation, std::as_writable_bytes(std::span(got)), kTimeout,
                       std::move(done));
    });
    engine_->Drive([&] { return is_sent.load(); }, MonotonicClock().Now() + 2 * kTimeout);
    CHECK(is_sent);
    for (size_t i = 0; receiving.ok() && i < count; ++i) {
      right = right && got[i] == Value(from, i, operation);
    }
    receiving.Update(sending);
    return receiving;
  }

  const std::shared_ptr<HostGroup> group_;
  const std::unique_ptr<CollectiveEngine> engine_;
  float* const block_;
};

// Builds the group of a plan, and works in it until it fails.
void RunGroup(Stage* stage, uint32_t generation, int slot, float* block) {
  const Stage::Plan& plan = stage->plans[generation];
  Stage::Report& report = stage->reports[generation][slot];
  absl::Status status;
  {
    StageStore store(stage, generation);
    auto entry = GroupEntry::Run(store, {.member = plan.member_of[slot],
                                         .size = plan.size,
                                         .timeout = absl::Milliseconds(plan.timeout_ms)});
    status = entry.status();
    if (entry.ok()) {
      Member member(*std::move(entry), block);
      std::mt19937_64 random(plan.seed);
      status = member.Barrier();
      if (status.ok()) {
        report.built_ns = MonotonicNanoseconds();
        stage->Changed();
      }
      while (status.ok()) {
        const uint32_t operation = report.operations.fetch_add(1);
        status = member.RunRandom(random, operation, report.corrupt);
      }
      const int64_t failed_ns = MonotonicNanoseconds();
      const HostGroup::End end = member.end();
      report.end_kind = static_cast<int32_t>(end.kind);
      report.end_member = end.member;
      report.code = static_cast<int32_t>(status.code());
      status.message().copy(report.message, sizeof report.message - 1);
      report.failed_ns = failed_ns;
    }
  }
  if (report.failed_ns == 0) {
    report.code = static_cast<int32_t>(status.code());
    status.message().copy(report.message, sizeof report.message - 1);
    report.failed_ns = MonotonicNanoseconds();
  }
  stage->Changed();
}

}  // namespace

void RunStageMember(Stage* stage, int slot) {
  std::vector<char> ballast(stage->ballast_bytes[slot]);
  std::memset(ballast.data(), 1, ballast.size());
  Arena& arena = Arena::OfProcess();
  auto demand = arena.AddDemand({.gradient_bytes = {kInArena * sizeof(float)}});
  CHECK(demand.ok()) << demand.status();
  auto* const block = static_cast<float*>(arena.Allocate(kInArena * sizeof(float)));
  CHECK(block != nullptr);
  stage->ready[slot] = 1;
  stage->Changed();
  for (uint32_t generation = 0;; ++generation) {
    while (!stage->Await([&] { return stage->generations > generation; }, kTimeout)) {
    }
    if (stage->plans[generation].member_of[slot] >= 0) RunGroup(stage, generation, slot, block);
  }
}

}  // namespace ddp::internal
