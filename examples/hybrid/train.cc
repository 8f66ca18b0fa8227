// Trains a model whose embedding lies on another process: a parameter server holds the table, and
// the trainers fetch rows by remote calls. The backward goes through the server; the dense layers
// are a DistributedDataParallel over the trainers alone. Any process may be killed: ddprun restarts
// all, and training continues from the newest checkpoint, bit by bit. The checkpoint has the table
// and the state of the table's optimizer, which both lie on the server.
//
//   bazel run -c opt //examples/hybrid:train.launch -- --nproc-per-node=3 --max-restarts=3 --
//       --checkpoint_dir=/tmp/hybrid
//
// Roles: the last rank is the server. With `ddprun --role=server` on one node and --role=trainer on
// the others, the names decide. A job of one rank is trainer and server at once.
#include <torch/torch.h>

#include <gflags/gflags.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "ddp/ddp.h"
#include "ddp/rpc/rpc.h"
#include "elastic/checkpoint/checkpointer.h"
#include "elastic/worker/run_worker.h"
#include "elastic/worker/worker_session.h"

DEFINE_string(text, "", "the text to learn; default: the speech of this repository");
DEFINE_int32(steps, 200, "training steps");
DEFINE_int32(batch_size, 32, "characters of one step, over all trainers together");
DEFINE_double(lr, 0.5, "learning rate of SGD, for the dense layers");
DEFINE_string(table_optimizer, "adagrad", "optimizer of the table: adagrad or sgd");
DEFINE_double(table_lr, 0.05, "learning rate of the table");
DEFINE_bool(sparse, false, "let gradients of the table hold the rows in use only");
DEFINE_string(checkpoint_dir, "", "where checkpoints go; empty: nowhere");
DEFINE_int32(checkpoint_every, 20, "steps between checkpoints");

namespace {

namespace fs = std::filesystem;
namespace rpc = ddp::rpc;

constexpr int64_t kCharacters = 128;  // ASCII
constexpr int64_t kContext = 8;       // characters from which the next one is guessed
constexpr int64_t kWidth = 16;        // of a row of the table

std::string ReadText() {
  const std::string in_repository = "examples/hybrid/text.txt";
  const fs::path runfiles = fs::read_symlink("/proc/self/exe").string() + ".runfiles";
  for (const fs::path& path :
       {fs::path(FLAGS_text), runfiles / "ddp" / in_repository, fs::path(in_repository)}) {
    if (!fs::is_regular_file(path)) continue;
    std::ifstream file(path);
    std::ostringstream text;
    text << file.rdbuf();
    if (text.str().size() > kContext) return text.str();
  }
  throw std::runtime_error("no text of more than 8 characters: name one with --text");
}

// The server's part of the model.
class Table {
 public:
  explicit Table(torch::Tensor weight) : weight_(std::move(weight)) {}
  torch::Tensor lookup(const torch::Tensor& ids) const {
    return torch::embedding(weight_, ids, -1, false, FLAGS_sparse);
  }
  std::vector<torch::Tensor> parameters() const { return {weight_}; }

 private:
  const torch::Tensor weight_;
};

// The trainers' part.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    hidden = register_module("hidden", torch::nn::Linear(kContext * kWidth, 64));
    output = register_module("output", torch::nn::Linear(64, kCharacters));
  }
  // rows: [N, kContext, kWidth]. Returns scores [N, kCharacters].
  torch::Tensor forward(const torch::Tensor& rows) {
    return output->forward(torch::tanh(hidden->forward(rows.flatten(1))));
  }
  torch::nn::Linear hidden{nullptr}, output{nullptr};
};
TORCH_MODULE(Net);

// All of the model and the state of the table's optimizer, as a checkpoint holds them. Every rank
// has one. Between checkpoints, the current values are the table of the server, the net of the
// trainers, and the state of the server's optimizer.
struct StateImpl : torch::nn::Module {
  StateImpl() {
    torch::manual_seed(1);
    net = register_module("net", Net());
    table = register_parameter("table", torch::randn({kCharacters, kWidth}));
    if (FLAGS_table_optimizer != "adagrad") return;  // plain SGD has no state
    table_state = {register_buffer("table_steps", torch::zeros({}, torch::kLong)),
                   register_buffer("table_sum", torch::zeros({kCharacters, kWidth}))};
  }
  Net net{nullptr};
  torch::Tensor table;
  std::vector<torch::Tensor> table_state;
};
TORCH_MODULE(State);

// The optimizer of the table. The steps of several trainers add up, and are not averaged.
rpc::OptimizerSpec TableOptimizer(int trainers) {
  if (FLAGS_table_optimizer == "adagrad") return rpc::adagrad(FLAGS_table_lr);
  if (FLAGS_table_optimizer == "sgd") return rpc::sgd(FLAGS_table_lr / trainers);
  throw std::invalid_argument("--table_optimizer is neither adagrad nor sgd");
}

// The ranks by their roles.
struct Roles {
  int server = 0;
  std::vector<int> trainers;
  bool is_server = false;
  int trainer = -1;  // the number among the trainers; -1: none
};

Roles AssignRoles(ddp::ProcessGroup& world) {
  const char* const name = std::getenv("ROLE_NAME");
  const bool last = world.rank() + 1 == world.size();
  std::string role = name == nullptr ? "" : name;
  if (role != "server" && role != "trainer") role = last ? "server" : "trainer";
  const auto key = [](int rank) { return "role/" + std::to_string(rank); };
  world.store()->set(key(world.rank()), std::vector<uint8_t>(role.begin(), role.end()));
  Roles roles{.server = -1};
  for (int rank = 0; rank < world.size(); ++rank) {
    const std::vector<uint8_t> value = world.store()->get(key(rank));
    const bool serves = std::string(value.begin(), value.end()) == "server";
    if (serves && roles.server >= 0) throw std::invalid_argument("there are two servers");
    if (serves) roles.server = rank;
    if (!serves || world.size() == 1) {
      if (rank == world.rank()) roles.trainer = static_cast<int>(roles.trainers.size());
      roles.trainers.push_back(rank);
    }
  }
  if (roles.server < 0) throw std::invalid_argument("there is no server");
  roles.is_server = roles.server == world.rank();
  return roles;
}

// A trainer's characters of a step, which depend on the step alone, and the ones that follow them.
struct Batch {
  torch::Tensor contexts;  // [N, kContext]
  torch::Tensor next;      // [N]
};

Batch MakeBatch(const std::string& text, int64_t step, int trainer, int64_t trainers) {
  std::vector<int64_t> contexts;
  std::vector<int64_t> next;
  const auto positions = static_cast<int64_t>(text.size()) - kContext;
  for (int64_t i = trainer; i < FLAGS_batch_size; i += trainers) {
    const int64_t begin = (step * FLAGS_batch_size + i) * 7919 % positions;
    for (int64_t j = 0; j < kContext; ++j) contexts.push_back(text[begin + j] & 127);
    next.push_back(text[begin + kContext] & 127);
  }
  const auto count = static_cast<int64_t>(next.size());
  return {.contexts = torch::tensor(contexts).reshape({count, kContext}),
          .next = torch::tensor(next)};
}

// Everything that a trainer needs for its steps.
class Trainer {
 public:
  Trainer(const Roles& roles, const State& state, std::shared_ptr<ddp::ProcessGroup> group)
      : number_(roles.trainer),
        group_(std::move(group)),
        text_(ReadText()),
        table_(rpc::sync<rpc::RRef<Table>>("rank" + std::to_string(roles.server), "table")),
        model_(state->net, group_),
        remote_(TableOptimizer(group_->size()), {table_}),
        local_(rpc::sgd(FLAGS_lr), {}, model_->parameters()) {
    if (number_ == 0) remote_.load_state(table_, state->table_state);
  }

  // Computes the gradients of a step. Returns the mean loss of all trainers.
  double Backward(rpc::AutogradContext& context, int64_t step) {
    const Batch batch = MakeBatch(text_, step, number_, group_->size());
    const torch::Tensor rows = table_.sync<torch::Tensor>("lookup", batch.contexts);
    const torch::Tensor loss =
        torch::nn::functional::cross_entropy(model_.forward(rows), batch.next);
    context.backward(loss);
    torch::Tensor mean = loss.detach().clone();
    group_->all_reduce(mean, ddp::ReduceOp::kAverage);
    return mean.item<double>();
  }

  std::vector<torch::Tensor> TableState() const { return remote_.state(table_); }
  void StepTable(rpc::AutogradContext& context) { remote_.step(context); }
  void StepNet(rpc::AutogradContext& context) { local_.step(context); }

 private:
  const int number_;
  const std::shared_ptr<ddp::ProcessGroup> group_;
  const std::string text_;
  const rpc::RRef<Table> table_;
  ddp::DistributedDataParallel<Net> model_;
  rpc::DistributedOptimizer remote_;
  rpc::DistributedOptimizer local_;
};

// Brings the current table to the trainers, the current net to the server, and the current state of
// the table's optimizer to all ranks.
void Collect(ddp::ProcessGroup& world, const Roles& roles, const std::optional<Trainer>& trainer,
             State& state) {
  torch::NoGradGuard no_grad;
  if (roles.trainer == 0) {
    const std::vector<torch::Tensor> current = trainer->TableState();
    for (size_t i = 0; i < current.size(); ++i) state->table_state[i].copy_(current[i]);
  }
  for (torch::Tensor& tensor : state->table_state) {
    world.broadcast(tensor, roles.trainers.front());
  }
  world.broadcast(state->table, roles.server);
  for (torch::Tensor& parameter : state->net->parameters()) {
    world.broadcast(parameter, roles.trainers.front());
  }
}

int Train() {
  auto session = ddp::elastic::WorkerSession::from_environment();
  const auto world = ddp::init_process_group();
  const Roles roles = AssignRoles(*world);
  const auto trainers = world->new_group(roles.trainers);

  State state;
  std::optional<ddp::elastic::Checkpointer> checkpointer;
  ddp::elastic::TrainingState saved{.model = state.get()};
  if (!FLAGS_checkpoint_dir.empty()) {
    checkpointer.emplace(
        ddp::elastic::Checkpointer::options_for(session, world->store(), FLAGS_checkpoint_dir));
    checkpointer->restore(saved);
  }

  std::optional<rpc::RRef<Table>> table;
  rpc::Registry registry;
  registry.module<Table, torch::Tensor>("Table").method("lookup", &Table::lookup);
  registry.function("table", [&table] { return *table; });
  const auto workers = rpc::init(
      "rank" + std::to_string(world->rank()), world->store(),
      {.rank = world->rank(), .world_size = world->size(), .registry = std::move(registry)});
  if (roles.is_server) table = rpc::share(std::make_shared<Table>(state->table));
  workers->barrier();
  std::optional<Trainer> trainer;
  if (trainers) trainer.emplace(roles, state, trainers);
  world->barrier();  // the server's optimizer has its state

  double loss = 0;
  int64_t step = saved.step;
  for (bool stop = false; step < FLAGS_steps && !stop;) {
    std::optional<rpc::AutogradContext> context;
    if (trainer) loss = trainer->Backward(context.emplace(), step);
    world->barrier();  // every row is fetched before the table changes
    // In turn: the order of the updates decides the last bits.
    for (size_t turn = 0; turn < roles.trainers.size(); ++turn) {
      if (trainer && roles.trainer == static_cast<int>(turn)) trainer->StepTable(*context);
      world->barrier();
    }
    if (trainer) trainer->StepNet(*context);
    context.reset();
    session.commit(++step);
    stop = session.should_stop();
    if (roles.trainer == 0 && step % 10 == 0) {
      std::printf("step %ld loss %.17g\n", step, loss);
      std::fflush(stdout);
    }
    if (checkpointer && (step % FLAGS_checkpoint_every == 0 || stop || step == FLAGS_steps)) {
      Collect(*world, roles, trainer, state);
      saved.step = step;
      checkpointer->save(saved);
    }
  }
  Collect(*world, roles, trainer, state);
  if (roles.trainer == 0 && step == FLAGS_steps) {
    const auto sum = [](const torch::Tensor& tensor) {  // of absolute values: nothing cancels out
      return tensor.to(torch::kDouble).abs().sum().item<double>();
    };
    std::printf("table %.17g net %.17g", sum(state->table), sum(state->net->hidden->weight));
    for (const torch::Tensor& tensor : state->table_state) std::printf(" state %.17g", sum(tensor));
    std::printf("\n");
  }
  trainer.reset();
  table.reset();
  workers->shutdown();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  return ddp::elastic::run_worker(Train);
}
