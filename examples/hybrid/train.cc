// Trains a model whose embedding table lies on another process: the last rank is a parameter server
// that holds the table, and all other ranks are trainers that fetch rows by remote calls. The
// backward goes through the server. The dense layers are a DistributedDataParallel over the
// trainers alone. Any process may be killed: ddprun restarts all, and training continues from the
// newest checkpoint, bit by bit.
//
//   bazel run //examples/hybrid:train.launch -- --nproc-per-node=3 --max-restarts=3 -- /tmp/ratings
//
// The model learns how a user rates an item, from the ids of the two.
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ddp/ddp.h"
#include "ddp/rpc/rpc.h"
#include "elastic/checkpoint/checkpointer.h"
#include "elastic/worker/run_worker.h"
#include "elastic/worker/worker_session.h"

namespace rpc = ddp::rpc;

constexpr int64_t kUsers = 100;
constexpr int64_t kItems = 100;
constexpr int64_t kWidth = 8;       // of a row of the table
constexpr int64_t kBatch = 32;      // ratings of one trainer in a step
constexpr int64_t kSaveEvery = 20;  // steps

// The server's part of the model.
class Table {
 public:
  explicit Table(torch::Tensor rows) : rows_(std::move(rows)) {}
  torch::Tensor lookup(const torch::Tensor& ids) const { return torch::embedding(rows_, ids); }
  std::vector<torch::Tensor> parameters() const { return {rows_}; }  // for the optimizer

 private:
  const torch::Tensor rows_;
};

// The whole model, as a checkpoint holds it. Every rank has one. Between checkpoints, only the
// server's table and the trainers' net are up to date.
struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    table = register_parameter("table", torch::randn({kUsers + kItems, kWidth}));
    register_module("net", net);
  }
  torch::Tensor table;
  torch::nn::Sequential net{torch::nn::Linear(2 * kWidth, 32), torch::nn::Tanh(),
                            torch::nn::Linear(32, 1)};
};
TORCH_MODULE(Model);

// What a trainer needs for its steps.
class Trainer {
 public:
  Trainer(std::shared_ptr<ddp::ProcessGroup> trainers, const Model& model)
      : trainers_(std::move(trainers)),
        table_(rpc::sync<rpc::RRef<Table>>("server", "table")),
        net_(model->net, trainers_),
        // The server adds up the trainers' steps; the gradients of the net are averaged.
        table_optimizer_(rpc::sgd(5.0 / trainers_->size()), {table_}),
        net_optimizer_(rpc::sgd(0.1), {}, net_->parameters()) {}

  // Computes the gradients of a step. Returns the mean loss of all trainers.
  double Backward(rpc::AutogradContext& context, int64_t step) {
    // A batch depends on its step and its trainer alone: a restarted job draws the same again.
    torch::manual_seed(step * trainers_->size() + trainers_->rank());
    const torch::Tensor users = torch::randint(kUsers, {kBatch}, torch::kLong);
    const torch::Tensor items = torch::randint(kItems, {kBatch}, torch::kLong);
    const torch::Tensor ratings = torch::sin(users) + torch::cos(items);

    const torch::Tensor ids = torch::stack({users, kUsers + items}, 1);
    const torch::Tensor rows = table_.sync<torch::Tensor>("lookup", ids);  // on the server
    const torch::Tensor loss = torch::mse_loss(net_->forward(rows.flatten(1)).squeeze(1), ratings);
    context.backward(loss);  // also on the server

    torch::Tensor mean = loss.detach().clone();
    trainers_->all_reduce(mean, ddp::ReduceOp::kAverage);
    return mean.item<double>();
  }

  void StepTable(rpc::AutogradContext& context) { table_optimizer_.step(context); }
  void StepNet(rpc::AutogradContext& context) { net_optimizer_.step(context); }

 private:
  const std::shared_ptr<ddp::ProcessGroup> trainers_;
  const rpc::RRef<Table> table_;
  ddp::DistributedDataParallel<torch::nn::Sequential> net_;
  rpc::DistributedOptimizer table_optimizer_;
  rpc::DistributedOptimizer net_optimizer_;
};

// Brings the server's table and the trainers' net to all ranks, which then save together.
void Collect(ddp::ProcessGroup& world, Model& model) {
  torch::NoGradGuard no_grad;
  world.broadcast(model->table, world.size() - 1);
  for (torch::Tensor& parameter : model->net->parameters()) world.broadcast(parameter, 0);
}

int Train(const std::string& checkpoint_folder, int64_t steps) {
  auto session = ddp::elastic::WorkerSession::from_environment();
  const auto world = ddp::init_process_group();  // blocks until all ranks have joined
  const int server = world->size() - 1;
  if (server == 0) throw std::invalid_argument("a server and a trainer are two ranks at least");
  const bool serves = world->rank() == server;
  std::vector<int> trainer_ranks(server);
  std::iota(trainer_ranks.begin(), trainer_ranks.end(), 0);
  const auto trainers = world->new_group(trainer_ranks);  // null on the server

  torch::manual_seed(1);
  Model model;
  ddp::elastic::TrainingState state{.model = model.get()};
  std::optional<ddp::elastic::Checkpointer> checkpointer;
  if (!checkpoint_folder.empty()) {
    checkpointer.emplace(
        ddp::elastic::Checkpointer::options_for(session, world->store(), checkpoint_folder));
    checkpointer->restore(state);
  }

  std::optional<rpc::RRef<Table>> table;  // the server's
  rpc::Registry registry;
  registry.module<Table, torch::Tensor>("Table").method("lookup", &Table::lookup);
  registry.function("table", [&table] { return *table; });
  const auto workers = rpc::init(
      serves ? "server" : "trainer" + std::to_string(world->rank()), world->store(),
      {.rank = world->rank(), .world_size = world->size(), .registry = std::move(registry)});
  if (serves) table = rpc::share(std::make_shared<Table>(model->table));
  workers->barrier();  // the table can be called
  std::optional<Trainer> trainer;
  if (trainers) trainer.emplace(trainers, model);

  while (state.step < steps && !session.should_stop()) {
    std::optional<rpc::AutogradContext> context;
    double loss = 0;
    if (trainer) loss = trainer->Backward(context.emplace(), state.step);
    world->barrier();  // every row is fetched before the table changes
    // The trainers update the table in turn: the order of the updates decides the last bits.
    for (int turn = 0; turn < server; ++turn) {
      if (world->rank() == turn) trainer->StepTable(*context);
      world->barrier();
    }
    if (trainer) trainer->StepNet(*context);
    session.commit(++state.step);
    if (world->rank() == 0 && state.step % 10 == 0) {
      std::printf("step %ld loss %.9f\n", state.step, loss);
      std::fflush(stdout);
    }
    const bool last = state.step == steps || session.should_stop();
    if (checkpointer && (last || state.step % kSaveEvery == 0)) {
      Collect(*world, model);
      checkpointer->save(state);
    }
  }
  trainer.reset();
  table.reset();
  workers->shutdown();
  return 0;
}

int main(int argc, char** argv) {
  const std::string checkpoint_folder = argc > 1 ? argv[1] : "";
  const int64_t steps = argc > 2 ? std::atoll(argv[2]) : 400;
  return ddp::elastic::run_worker([&] { return Train(checkpoint_folder, steps); });
}
