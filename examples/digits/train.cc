// Trains a small convolutional net on handwritten digits, on any number of ranks, and survives the
// loss of any of them: a restarted generation goes on from the newest checkpoint. When nodes come
// or leave in good order, it saves one more before it makes way, so that nothing is lost.
//
//   bazel run -c opt //examples/digits:train.launch -- --nproc-per-node=2 --max-restarts=3 --
//       --epochs=20 --checkpoint_dir=/tmp/digits
//
// Reads IDX files, so the original MNIST files work as well (--data_dir).
#include <torch/torch.h>

#include <gflags/gflags.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "ddp/ddp.h"
#include "elastic/checkpoint/checkpointer.h"
#include "elastic/data/elastic_sampler.h"
#include "elastic/worker/error_file.h"
#include "elastic/worker/worker_session.h"
#include "examples/digits/idx_file.h"
#include "examples/digits/metrics_log.h"

DEFINE_string(data_dir, "", "folder with the IDX files; default: the digits of this repository");
DEFINE_int32(epochs, 20, "passes over the training images");
DEFINE_int32(batch_size, 32, "images of one step, over all ranks together");
DEFINE_double(lr, 0.05, "learning rate of SGD with momentum");
DEFINE_uint64(seed, 1, "of the weights, the order of the images and the dropout");
DEFINE_string(checkpoint_dir, "", "where checkpoints and metrics.jsonl go; empty: nowhere");
DEFINE_int32(checkpoint_every, 50, "steps between checkpoints; 0: only one, at the end");
DEFINE_string(commit_log, "",
              "existing folder for a file of each generation and rank: one line for each step, of "
              "its number, its epoch and the images that this rank used; empty: none");
DEFINE_bool(resume, false, "let a new job go on from the checkpoints in --checkpoint_dir");

namespace {

namespace fs = std::filesystem;
using ddp::elastic::Checkpointer;
using ddp::elastic::ElasticSampler;
using ddp::elastic::Phase;
using ddp::elastic::TrainingState;
using ddp::elastic::WorkerSession;
using ddp::examples::IdxFile;
using ddp::examples::MetricsLog;

void Require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

void RequireOk(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(std::string(status.message()));
}

void CheckFlags() {
  Require(FLAGS_epochs >= 1, "--epochs=" + std::to_string(FLAGS_epochs) + " must be at least 1");
  Require(FLAGS_batch_size >= 1,
          "--batch_size=" + std::to_string(FLAGS_batch_size) + " must be at least 1");
  Require(FLAGS_lr > 0, "--lr=" + std::to_string(FLAGS_lr) + " must be above 0");
  Require(FLAGS_checkpoint_every >= 0,
          "--checkpoint_every=" + std::to_string(FLAGS_checkpoint_every) + " must not be negative");
  Require(!FLAGS_resume || !FLAGS_checkpoint_dir.empty(), "--resume needs --checkpoint_dir");
}

// The digits lie in examples/digits/data, seen from the repository's root or from the runfiles.
std::string DataFolder() {
  if (!FLAGS_data_dir.empty()) return FLAGS_data_dir;
  const std::string in_repository = "examples/digits/data";
  const fs::path runfiles = fs::read_symlink("/proc/self/exe").string() + ".runfiles";
  for (const fs::path& folder : {runfiles / "ddp" / in_repository, fs::path(in_repository)}) {
    if (fs::is_directory(folder)) return folder.string();
  }
  throw std::runtime_error("the digits are neither in " + in_repository + " nor in " +
                           runfiles.string() + ": name their folder with --data_dir");
}

struct Dataset {
  torch::Tensor images;  // [N, 1, rows, columns], floats in 0..1
  torch::Tensor labels;  // [N], 0..9
  int64_t size() const { return labels.size(0); }
};

IdxFile ReadIdx(const std::string& path, int dimensions) {
  absl::StatusOr<IdxFile> file = IdxFile::Read(path, dimensions);
  RequireOk(file.status());
  return *std::move(file);
}

Dataset Load(const std::string& folder, const std::string& part, torch::Device device) {
  const std::string labels_path = folder + "/" + part + "-labels-idx1-ubyte";
  const IdxFile images = ReadIdx(folder + "/" + part + "-images-idx3-ubyte", 3);
  const IdxFile labels = ReadIdx(labels_path, 1);
  Require(images.shape[0] == labels.shape[0], labels_path + " has " +
                                                  std::to_string(labels.shape[0]) + " labels for " +
                                                  std::to_string(images.shape[0]) + " images");
  Require(images.shape[1] >= 4 && images.shape[2] >= 4, folder + ": images smaller than 4x4");
  Dataset data;
  data.images = torch::tensor(images.values, torch::kUInt8)
                    .to(torch::kFloat)
                    .div_(255)
                    .reshape({images.shape[0], 1, images.shape[1], images.shape[2]});
  data.labels = torch::tensor(labels.values, torch::kUInt8).to(torch::kLong);
  Require(data.labels.max().item<int64_t>() <= 9, labels_path + ": a label above 9");
  data.images = data.images.to(device);
  data.labels = data.labels.to(device);
  return data;
}

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t rows, int64_t columns) {
    conv1 =
        register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 3).padding(1)));
    conv2 =
        register_module("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 3).padding(1)));
    dropout = register_module("dropout", torch::nn::Dropout(0.25));
    fc1 = register_module("fc1", torch::nn::Linear(32 * (rows / 4) * (columns / 4), 64));
    fc2 = register_module("fc2", torch::nn::Linear(64, 10));
  }

  // images: [N, 1, rows, columns]. Returns scores [N, 10].
  torch::Tensor forward(const torch::Tensor& images) {
    torch::Tensor x = torch::max_pool2d(torch::relu(conv1->forward(images)), 2);
    x = torch::max_pool2d(torch::relu(conv2->forward(x)), 2);
    x = torch::relu(fc1->forward(x.flatten(1)));
    return fc2->forward(dropout->forward(x));
  }

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Dropout dropout{nullptr};
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(Net);

// The share of test images that are recognised; every rank looks at a part of them.
double Accuracy(Net& net, const Dataset& test, ddp::ProcessGroup& group) {
  torch::NoGradGuard no_grad;
  net->eval();
  const int64_t first = test.size() * group.rank() / group.size();
  const int64_t last = test.size() * (group.rank() + 1) / group.size();
  torch::Tensor correct = torch::zeros({1}, torch::kLong).to(group.device());
  constexpr int64_t kChunk = 1000;
  for (int64_t begin = first; begin < last; begin += kChunk) {
    const int64_t end = std::min(last, begin + kChunk);
    const torch::Tensor scores = net->forward(test.images.slice(0, begin, end));
    correct += scores.argmax(1).eq(test.labels.slice(0, begin, end)).sum();
  }
  net->train();
  group.all_reduce(correct);
  return correct.item<double>() / static_cast<double>(test.size());
}

// One training run: everything that the steps share.
class Trainer {
 public:
  Trainer(WorkerSession& session, std::shared_ptr<ddp::ProcessGroup> group)
      : session_(session), group_(std::move(group)), metrics_(MetricsPath()) {
    const std::string folder = DataFolder();
    const torch::Device device = group_->device();  // the CPU, or this rank's GPU
    train_ = Load(folder, "train", device);
    test_ = Load(folder, "t10k", device);
    torch::manual_seed(FLAGS_seed);
    net_ = Net(train_.images.size(2), train_.images.size(3));
    net_->to(device);
    // From here on the generator only serves dropout, which shall differ between the ranks.
    torch::manual_seed(FLAGS_seed + 1 + group_->rank());
    optimizer_ = std::make_unique<torch::optim::SGD>(
        net_->parameters(), torch::optim::SGDOptions(FLAGS_lr).momentum(0.9));
    sampler_ = std::make_unique<ElasticSampler>(
        ElasticSampler::Options{.dataset_size = train_.size(),
                                .global_batch_size = FLAGS_batch_size,
                                .seed = FLAGS_seed},
        group_->rank(), group_->size());
    Restore();
    OpenCommitLog();
    model_ = std::make_unique<ddp::DistributedDataParallel<NetImpl>>(
        net_, group_, ddp::DistributedDataParallelOptions{.bucket_layout = state_.bucket_layout});
  }

  // Until the last epoch is done, or until the job asks this generation to end. The next one goes
  // on from the checkpoint that is there then.
  void Run() {
    for (int64_t epoch = sampler_->epoch(); epoch < FLAGS_epochs && !stop_; ++epoch) {
      RunEpoch(static_cast<uint32_t>(epoch));
    }
    if (saved_step_ != state_.step) Save(Checkpointer::Urgency::kLast);
  }

 private:
  static std::string MetricsPath() { return FLAGS_checkpoint_dir + "/metrics.jsonl"; }

  // A restarted generation goes on from its job's newest checkpoint, always. A new job does so when
  // it is told to.
  void Restore() {
    state_ = {.model = net_.get(), .optimizer = optimizer_.get(), .sampler = sampler_.get()};
    if (FLAGS_checkpoint_dir.empty()) return;
    checkpointer_ = std::make_unique<Checkpointer>(
        Checkpointer::options_for(session_, group_->store(), FLAGS_checkpoint_dir));
    // Restarted, it finds what its earlier generations wrote. Anything else is another job's.
    const bool own = session_.is_restart() && checkpointer_->newest_run_id() == session_.run_id();
    Require(own || FLAGS_resume || !checkpointer_->has_checkpoint(),
            FLAGS_checkpoint_dir +
                " holds checkpoints already: go on from them with --resume, or name another "
                "folder with --checkpoint_dir");
    if (const auto restored = checkpointer_->restore(state_)) {
      saved_step_ = state_.step;
      if (group_->rank() == 0) {
        for (const std::string& reason : restored->passed_over) {
          std::fprintf(stderr, "passed over %s\n", reason.c_str());
        }
        std::fprintf(stderr, "goes on from %s\n", restored->folder.c_str());
      }
    }
    if (group_->rank() != 0) return;
    std::error_code error;
    fs::create_directories(FLAGS_checkpoint_dir, error);
    Require(!error, "cannot make the folder " + FLAGS_checkpoint_dir + ": " + error.message());
    // A disk that is full by now ends no job that could begin.
    const absl::Status cut = metrics_.CutBackTo(state_.step);
    if (!session_.is_restart()) RequireOk(cut);
    if (!cut.ok()) std::fprintf(stderr, "%s\n", std::string(cut.message()).c_str());
  }

  void OpenCommitLog() {
    if (FLAGS_commit_log.empty()) return;
    const std::string path =
        FLAGS_commit_log + "/generation-" + std::to_string(session_.generation()) + "-rank-" +
        std::to_string(group_->rank()) + "-of-" + std::to_string(group_->size()) + ".txt";
    commits_.open(path, std::ios::app);
    Require(commits_.is_open(), "cannot write " + path + ": is --commit_log a folder?");
  }

  void RunEpoch(uint32_t epoch) {
    sampler_->set_epoch(epoch);
    const auto start = std::chrono::steady_clock::now();
    double loss_sum = 0;  // over the images that this generation saw
    int64_t seen = 0;
    while (const auto batch = sampler_->next_batch()) {
      loss_sum += Step(*batch);
      seen += batch->global_size;
      const bool last = sampler_->state().cursor == train_.size();
      // The report of an epoch stands before the checkpoint that ends it, so that it is there when
      // a restart begins behind it.
      if (last) Report(epoch, loss_sum, seen, std::chrono::steady_clock::now() - start);
      if (FLAGS_checkpoint_every > 0 && state_.step % FLAGS_checkpoint_every == 0) Save();
      stop_ = session_.should_stop();  // the same answer after the same step on every rank
      if (stop_) return;
    }
  }

  // Returns the sum of this rank's losses. The phases tell ddprun what a rank does that is slow or
  // does not get on.
  double Step(const ElasticSampler::Batch& batch) {
    Dataset mine;
    {
      const auto phase = session_.phase(Phase::kData);
      const torch::Tensor indices = torch::tensor(batch.indices, torch::kLong).to(group_->device());
      mine = {train_.images.index_select(0, indices), train_.labels.index_select(0, indices)};
    }
    torch::Tensor loss;
    {
      const auto phase = session_.phase(Phase::kForward);
      const torch::Tensor scores = model_->forward(mine.images);
      loss = torch::nn::functional::cross_entropy(
          scores, mine.labels,
          torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
    }
    {
      const auto phase = session_.phase(Phase::kBackward);
      optimizer_->zero_grad();
      // Gradients are averaged over the ranks: scaled like this, the average is the gradient of the
      // whole batch's mean, also when the ranks' shares differ.
      (loss * group_->size() / batch.global_size).backward();
    }
    {
      const auto phase = session_.phase(Phase::kOptimizer);
      optimizer_->step();
    }
    sampler_->commit();
    state_.epoch = batch.epoch;
    session_.commit(++state_.step);
    LogCommit(batch);
    return loss.item<double>();
  }

  void LogCommit(const ElasticSampler::Batch& batch) {
    if (!commits_.is_open()) return;
    commits_ << state_.step << ' ' << batch.epoch;
    for (const int64_t index : batch.indices) commits_ << ' ' << index;
    commits_ << '\n' << std::flush;
  }

  void Report(uint32_t epoch, double loss_sum, int64_t seen, std::chrono::duration<double> took) {
    const auto phase = session_.phase(Phase::kEvaluation);
    torch::Tensor total = torch::tensor({loss_sum}, torch::kDouble).to(group_->device());
    group_->all_reduce(total);
    const double accuracy = Accuracy(net_, test_, *group_);
    if (group_->rank() != 0) return;
    const MetricsLog::Entry entry{.step = state_.step,
                                  .epoch = epoch,
                                  .loss = total.item<double>() / static_cast<double>(seen),
                                  .test_accuracy = accuracy,
                                  .samples_per_second = static_cast<double>(seen) / took.count()};
    std::printf("epoch %u loss %.4f test_accuracy %.4f samples_per_second %.0f\n", epoch,
                entry.loss, entry.test_accuracy, entry.samples_per_second);
    std::fflush(stdout);
    if (!checkpointer_) return;
    // A full disk is no reason to stop.
    const absl::Status appended = metrics_.Append(entry);
    if (!appended.ok()) {
      std::fprintf(stderr, "%s\n", std::string(appended.message()).c_str());
    }
  }

  // Training goes on when a checkpoint cannot be saved; the checkpointer has said why.
  void Save(Checkpointer::Urgency urgency = Checkpointer::Urgency::kRoutine) {
    if (!checkpointer_) return;
    state_.bucket_layout = model_->bucket_layout();
    if (!checkpointer_->save(state_, urgency).empty()) {
      saved_step_ = state_.step;
    } else if (urgency == Checkpointer::Urgency::kLast && group_->rank() == 0) {
      std::fprintf(stderr, "the last checkpoint was not saved: the steps from %lld on are lost\n",
                   static_cast<long long>(std::max<int64_t>(saved_step_, 0)));
    }
  }

  WorkerSession& session_;
  const std::shared_ptr<ddp::ProcessGroup> group_;
  const MetricsLog metrics_;
  std::ofstream commits_;
  Dataset train_;
  Dataset test_;
  Net net_{nullptr};
  std::unique_ptr<torch::optim::SGD> optimizer_;
  std::unique_ptr<ElasticSampler> sampler_;
  std::unique_ptr<Checkpointer> checkpointer_;  // null without --checkpoint_dir
  TrainingState state_;
  std::unique_ptr<ddp::DistributedDataParallel<NetImpl>> model_;
  int64_t saved_step_ = -1;
  bool stop_ = false;
};

int Train() {
  CheckFlags();
  WorkerSession session = WorkerSession::from_environment();
  Trainer trainer(session, ddp::init_process_group());
  trainer.Run();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  gflags::SetUsageMessage("trains a small convolutional net on handwritten digits; see train.cc");
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  return ddp::elastic::run_worker(Train);
}
