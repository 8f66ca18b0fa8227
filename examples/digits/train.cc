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

#include <cstdio>
#include <stdexcept>

#include "ddp/ddp.h"
#include "elastic/training/training.h"
#include "elastic/worker/run_worker.h"
#include "examples/digits/idx_file.h"
#include "examples/example_file.h"

DEFINE_string(data_dir, "", "folder with the IDX files; default: the digits of this repository");
DEFINE_int32(epochs, 20, "passes over the training images");
DEFINE_int32(batch_size, 32, "images of one step, over all ranks together");
DEFINE_double(lr, 0.05, "learning rate of SGD with momentum");
DEFINE_string(checkpoint_dir, "", "where checkpoints go; empty: nowhere");
DEFINE_int32(checkpoint_every, 50, "steps between checkpoints; 0: only one, at the end");
DEFINE_bool(resume, false, "continue from the checkpoints of an earlier job, whatever its run ID");

namespace {

using ddp::elastic::Training;
using ddp::examples::IdxFile;

std::string DataFolder() {
  if (!FLAGS_data_dir.empty()) return FLAGS_data_dir;
  return ExampleFile("examples/digits/data", "--data_dir");
}

struct Dataset {
  torch::Tensor images;  // [N, 1, rows, columns], floats in 0..1
  torch::Tensor labels;  // [N], 0..9
  int64_t size() const { return labels.size(0); }
};

Dataset Load(const std::string& part, torch::Device device) {
  const std::string path = DataFolder() + "/" + part;
  const IdxFile images = IdxFile::Read(path + "-images-idx3-ubyte", 3);
  const IdxFile labels = IdxFile::Read(path + "-labels-idx1-ubyte", 1);
  Dataset data;
  data.images = torch::tensor(images.values, torch::kUInt8)
                    .reshape({images.shape[0], 1, images.shape[1], images.shape[2]})
                    .to(device, torch::kFloat)
                    .div_(255);
  data.labels = torch::tensor(labels.values, torch::kUInt8).to(device, torch::kLong);
  if (data.images.size(0) != data.size()) {
    throw std::runtime_error(path + ": " + std::to_string(data.size()) + " labels for " +
                             std::to_string(data.images.size(0)) + " images");
  }
  return data;
}

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t rows, int64_t columns) : fc1(32 * (rows / 4) * (columns / 4), 64) {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
    register_module("dropout", dropout);
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }

  // images: [N, 1, rows, columns]. Returns scores [N, 10].
  torch::Tensor forward(const torch::Tensor& images) {
    torch::Tensor x = torch::max_pool2d(torch::relu(conv1->forward(images)), 2);
    x = torch::max_pool2d(torch::relu(conv2->forward(x)), 2);
    x = torch::relu(fc1->forward(x.flatten(1)));
    return fc2->forward(dropout->forward(x));
  }

  torch::nn::Conv2d conv1{torch::nn::Conv2dOptions(1, 16, 3).padding(1)};
  torch::nn::Conv2d conv2{torch::nn::Conv2dOptions(16, 32, 3).padding(1)};
  torch::nn::Dropout dropout{0.25};
  torch::nn::Linear fc1;
  torch::nn::Linear fc2{64, 10};
};
TORCH_MODULE(Net);

// Returns the share of test images that the net recognises. Each rank evaluates a part of them, so
// every rank must call it.
double Accuracy(Net& net, const Dataset& test, ddp::ProcessGroup& group) {
  torch::NoGradGuard no_grad;
  net->eval();
  const int64_t first = test.size() * group.rank() / group.size();
  const int64_t last = test.size() * (group.rank() + 1) / group.size();
  torch::Tensor correct = torch::zeros({1}, torch::kLong).to(group.device());
  constexpr int64_t kChunk = 1000;  // bounds the memory
  for (int64_t begin = first; begin < last; begin += kChunk) {
    const int64_t end = std::min(last, begin + kChunk);
    const torch::Tensor scores = net->forward(test.images.slice(0, begin, end));
    correct += scores.argmax(1).eq(test.labels.slice(0, begin, end)).sum();
  }
  net->train();
  group.all_reduce(correct);
  return correct.item<double>() / static_cast<double>(test.size());
}

int Train() {
  const auto group = ddp::init_process_group();  // blocks until all ranks have joined
  const torch::Device device = group->device();  // the CPU, or this rank's GPU
  const Dataset train = Load("train", device);
  const Dataset test = Load("t10k", device);

  torch::manual_seed(1);
  Net net(train.images.size(2), train.images.size(3));
  net->to(device);
  ddp::DistributedDataParallel model(net, group);
  // From here on the generator serves only dropout, which must differ between the ranks.
  torch::manual_seed(2 + group->rank());
  torch::optim::SGD optimizer(model->parameters(),
                              torch::optim::SGDOptions(FLAGS_lr).momentum(0.9));
  Training training(
      model, optimizer,
      {.dataset_size = train.size(),
       .global_batch_size = FLAGS_batch_size,
       .epochs = FLAGS_epochs,
       .checkpoint_folder = FLAGS_checkpoint_dir,
       .checkpoint_every = FLAGS_checkpoint_every,
       .resume = FLAGS_resume ? Training::Resume::kAny : Training::Resume::kSameRunId});
  if (training.restored() && group->rank() == 0) {
    std::fprintf(stderr, "continues from %s\n", training.restored()->folder.c_str());
  }

  while (training.next_epoch()) {
    while (const auto batch = training.next_batch()) {
      const torch::Tensor mine = torch::tensor(batch->indices, torch::kLong).to(device);
      const torch::Tensor scores = model->forward(train.images.index_select(0, mine));
      training.step(
          torch::nn::functional::cross_entropy(scores, train.labels.index_select(0, mine)));
    }
    if (!training.epoch_complete()) continue;  // this generation ends; the next one continues
    const double loss = training.mean_loss();
    const double accuracy = Accuracy(net, test, *group);
    if (group->rank() != 0) continue;
    std::printf("epoch %ld loss %.4f test_accuracy %.4f\n", training.epoch(), loss, accuracy);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  gflags::SetUsageMessage("trains a small convolutional net on handwritten digits; see train.cc");
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  return ddp::elastic::run_worker(Train);
}
