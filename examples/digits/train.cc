// Trains a small convolutional net on handwritten digits, on any number of ranks. The job survives
// the loss of any rank: a restarted generation continues from the newest checkpoint. When nodes
// come or leave in good order, the trainer saves one more checkpoint before it stops, so no step is
// lost.
//
//   bazel run -c opt //examples/digits:train.launch -- --nproc-per-node=2 --max-restarts=3 --
//       --epochs=20 --checkpoint_dir=/tmp/digits
//
// The trainer reads IDX files, so the original MNIST files work as well (--data_dir).
#include <torch/torch.h>

#include <gflags/gflags.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "ddp/ddp.h"
#include "elastic/data/elastic_sampler.h"
#include "elastic/training/training.h"
#include "elastic/worker/run_worker.h"
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
DEFINE_string(resume, "same_run_id",
              "whose checkpoints in --checkpoint_dir a new job continues: never, same_run_id "
              "(--rdzv-id), any");
DEFINE_bool(keep_lr, true, "continue with the checkpoint's learning rate, not with --lr");
DEFINE_bool(require_checkpoint, false, "fail when the last checkpoint cannot be saved");

namespace {

namespace fs = std::filesystem;
using ddp::elastic::Checkpointer;
using ddp::elastic::ElasticSampler;
using ddp::elastic::Training;
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
  Require(FLAGS_resume != "any" || !FLAGS_checkpoint_dir.empty(),
          "--resume=any needs --checkpoint_dir");
}

Training::Resume ResumeFlag() {
  if (FLAGS_resume == "never") return Training::Resume::kNever;
  if (FLAGS_resume == "any") return Training::Resume::kAny;
  Require(FLAGS_resume == "same_run_id",
          "--resume=" + FLAGS_resume + " must be never, same_run_id or any");
  return Training::Resume::kSameRunId;
}

// Returns --data_dir or, by default, examples/digits/data in the runfiles or in the current folder.
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

// Returns the samples of `data` that a batch lists.
Dataset Select(const Dataset& data, const std::vector<int64_t>& indices) {
  const torch::Tensor rows = torch::tensor(indices, torch::kLong).to(data.labels.device());
  return {data.images.index_select(0, rows), data.labels.index_select(0, rows)};
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

// Returns the share of test images that are recognised. Every rank evaluates a part of them, so
// every rank must call it.
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

// Writes the trainer's progress: to stdout, to metrics.jsonl, and to the commit log.
class Reports {
 public:
  Reports(const ddp::elastic::Training& training, const WorkerSession& session)
      : writes_metrics_(session.rank() == 0 && !FLAGS_checkpoint_dir.empty()),
        metrics_(FLAGS_checkpoint_dir + "/metrics.jsonl") {
    if (session.rank() == 0 && training.restored()) {
      std::fprintf(stderr, "goes on from %s\n", training.restored()->folder.c_str());
    }
    if (writes_metrics_) OpenMetrics(training.steps());
    if (!FLAGS_commit_log.empty()) OpenCommitLog(session);
  }

  void Epoch(const MetricsLog::Entry& entry) {
    std::printf("epoch %ld loss %.4f test_accuracy %.4f samples_per_second %.0f\n", entry.epoch,
                entry.loss, entry.test_accuracy, entry.samples_per_second);
    std::fflush(stdout);
    if (writes_metrics_) Warn(metrics_.Append(entry));
  }

  void Commit(int64_t step, const ElasticSampler::Batch& batch) {
    if (!commits_.is_open()) return;
    commits_ << step << ' ' << batch.epoch;
    for (const int64_t index : batch.indices) commits_ << ' ' << index;
    commits_ << '\n' << std::flush;
  }

 private:
  // Makes the folder and removes the metrics after `step`, because these steps are trained again.
  void OpenMetrics(int64_t step) {
    std::error_code error;
    fs::create_directories(FLAGS_checkpoint_dir, error);
    Require(!error, "cannot make the folder " + FLAGS_checkpoint_dir + ": " + error.message());
    // A write error ends a new job. A job that continues only warns: its disk may have filled up
    // since.
    const absl::Status cut = metrics_.CutBackTo(step);
    step > 0 ? Warn(cut) : RequireOk(cut);
  }

  static void Warn(const absl::Status& status) {
    if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  }

  void OpenCommitLog(const WorkerSession& session) {
    const std::string path =
        FLAGS_commit_log + "/generation-" + std::to_string(session.generation()) + "-rank-" +
        std::to_string(session.rank()) + "-of-" + std::to_string(session.world_size()) + ".txt";
    commits_.open(path, std::ios::app);
    Require(commits_.is_open(), "cannot write " + path + ": is --commit_log a folder?");
  }

  const bool writes_metrics_;
  const MetricsLog metrics_;
  std::ofstream commits_;
};

int Train() {
  CheckFlags();
  const auto group = ddp::init_process_group();
  const torch::Device device = group->device();  // the CPU, or this rank's GPU
  const Dataset train = Load(DataFolder(), "train", device);
  const Dataset test = Load(DataFolder(), "t10k", device);

  torch::manual_seed(FLAGS_seed);
  Net net(train.images.size(2), train.images.size(3));
  net->to(device);
  ddp::DistributedDataParallel model(net, group);
  // From here on the generator serves only dropout, which must differ between the ranks.
  torch::manual_seed(FLAGS_seed + 1 + group->rank());
  torch::optim::SGD optimizer(model->parameters(),
                              torch::optim::SGDOptions(FLAGS_lr).momentum(0.9));
  ddp::elastic::Training training(
      model, optimizer,
      {.dataset_size = train.size(),
       .global_batch_size = FLAGS_batch_size,
       .epochs = FLAGS_epochs,
       .seed = FLAGS_seed,
       .checkpoint_folder = FLAGS_checkpoint_dir,
       .checkpoint_every = FLAGS_checkpoint_every,
       .resume = ResumeFlag(),
       .optimizer_options = FLAGS_keep_lr ? Checkpointer::OptimizerOptions::kFromCheckpoint
                                          : Checkpointer::OptimizerOptions::kFromProgram,
       .require_last_checkpoint = FLAGS_require_checkpoint});
  Reports reports(training, training.session());

  while (training.next_epoch()) {
    const auto start = std::chrono::steady_clock::now();
    const int64_t first_step = training.steps();
    while (const auto batch = training.next_batch()) {
      Dataset mine;
      {
        const auto phase = training.session().phase(ddp::elastic::Phase::kData);
        mine = Select(train, batch->indices);
      }
      const torch::Tensor scores = model->forward(mine.images);
      training.step(torch::nn::functional::cross_entropy(scores, mine.labels));
      reports.Commit(training.steps(), *batch);
    }
    if (!training.epoch_complete()) continue;  // the next generation continues this epoch
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    const MetricsLog::Entry entry{
        .step = training.steps(),
        .epoch = training.epoch(),
        .loss = training.mean_loss(),
        .test_accuracy = Accuracy(net, test, *group),
        .samples_per_second =
            static_cast<double>((training.steps() - first_step) * FLAGS_batch_size) / took.count()};
    if (group->rank() == 0) reports.Epoch(entry);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  gflags::SetUsageMessage("trains a small convolutional net on handwritten digits; see train.cc");
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  return ddp::elastic::run_worker(Train);
}
