// Tests that the steady-state backward has no allocation, no lock and no ATen operation per
// parameter. Counts the calls on the thread of the backward, for the wrapped and the bare module,
// each with few and with many parameters. The wrapper's share must not grow with the number of
// parameters.
#include <dlfcn.h>
#include <pthread.h>

#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <cstdlib>
#include <new>

#include "base/mutex.h"
#include "ddp/common/torch_versions.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/process_group.h"
#include "gtest/gtest.h"
#include "testing/ranks/rank_test.h"

namespace {

struct Counts {
  int64_t allocations = 0;
  int64_t locks = 0;
  int64_t operations = 0;
};

thread_local bool counting = false;
thread_local Counts counts;

}  // namespace

// Replaces the C++ library's operator: every object and container of ours is allocated here.
void* operator new(std::size_t size) {
  if (counting) ++counts.allocations;
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

// Replaces libc's function, which it then calls: std::mutex calls this one.
extern "C" int pthread_mutex_lock(pthread_mutex_t* mutex) {
  using Lock = int (*)(pthread_mutex_t*);
  static Lock lock = nullptr;  // not a guarded initialization: that would lock
  if (lock == nullptr) lock = reinterpret_cast<Lock>(dlsym(RTLD_NEXT, "pthread_mutex_lock"));
  if (counting) ++counts.locks;
  return lock(mutex);
}

namespace ddp {
namespace {

struct ManyImpl : torch::nn::Module {
  explicit ManyImpl(int count) {
    for (int i = 0; i < count; ++i) {
      weights.push_back(
          register_parameter("weight" + std::to_string(i), torch::ones({16}) * (i % 3)));
    }
  }
  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor y = x;
    for (const torch::Tensor& weight : weights) y = y + weight;
    return y;
  }
  std::vector<torch::Tensor> weights;
};
TORCH_MODULE(Many);

// Autograd itself copies a list for every accumulator with a hook. The bare module gets hooks too,
// so that this is not counted for the wrapper.
struct NoHook : torch::autograd::FunctionPostHook {
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    return outputs;
  }
};

// Counts the calls of the fifth backward, when buckets are rebuilt and gradients exist.
template <typename Forward>
Counts CountBackward(Many net, Forward forward) {
  for (int step = 0; step < 4; ++step) {
    net->zero_grad(/*set_to_none=*/false);
    forward().sum().backward();
  }
  net->zero_grad(false);
  const torch::Tensor loss = forward().sum();
  counts = {};
  counting = true;
  loss.backward();
  counting = false;
  return counts;
}

Counts CostOfWrapper(const std::shared_ptr<ProcessGroup>& group, int parameters,
                     const DistributedDataParallelOptions& options) {
  const torch::Tensor input = torch::ones({16});
  Many bare(parameters);
  std::vector<torch_versions::NodePtr> accumulators;  // held weakly by the parameters
  for (const torch::Tensor& weight : bare->weights) {
    accumulators.push_back(torch::autograd::impl::grad_accumulator(weight));
    accumulators.back()->add_post_hook(std::make_unique<NoHook>());
  }
  const Counts without = CountBackward(bare, [&] { return bare->forward(input); });
  Many net(parameters);
  DistributedDataParallel model(net, group, options);
  const Counts with = CountBackward(net, [&] { return model.forward(input); });
  return {.allocations = with.allocations - without.allocations,
          .locks = with.locks - without.locks,
          .operations = with.operations - without.operations};
}

RANK_TEST(ReducerHotPathTest, NothingGrowsWithTheParameters, .world_size = 2,
          .not_on_device = "it counts what the hooks do on the CPU, on the caller's thread") {
  at::addGlobalCallback(at::RecordFunctionCallback([](const at::RecordFunction&)
                                                       -> std::unique_ptr<at::ObserverContext> {
                          if (counting) ++counts.operations;
                          return nullptr;
                        }).scopes({at::RecordScope::FUNCTION}));
  const auto group = init_process_group();
  for (const DistributedDataParallelOptions& options : std::vector<DistributedDataParallelOptions>{
           {}, {.gradient_as_bucket_view = true}, {.static_graph = true}}) {
    const Counts few = CostOfWrapper(group, 20, options);
    const Counts many = CostOfWrapper(group, 420, options);
    // Waiting for the peer takes a lock at each wake-up, so small differences mean nothing.
    constexpr int kNoise = 40;
    EXPECT_LT(many.allocations - few.allocations, kNoise);
    EXPECT_LT(many.locks - few.locks, kNoise);
    EXPECT_EQ(many.operations, few.operations);
  }
}

// Checks the counters: a wrapper with these calls per parameter would be found.
TEST(ReducerHotPathTest, CountersCount) {
  counts = {};
  counting = true;
  { std::vector<int> vector(3); }
  Mutex mutex;
  { MutexLock lock(mutex); }
  counting = false;
  EXPECT_EQ(counts.allocations, 1);
  EXPECT_EQ(counts.locks, 1);
}

}  // namespace
}  // namespace ddp
