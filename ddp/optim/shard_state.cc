#include "ddp/optim/shard_state.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/serialize/archive.h>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/optim/sharded_parameters.h"
#include "ddp/process_group.h"

namespace ddp::internal {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr int64_t kRoundBytes = int64_t{64} << 20;

using Fields = std::map<std::string, c10::IValue>;

std::string BytesOf(OutputArchive& archive) {
  std::ostringstream stream;
  archive.save_to(stream);
  return std::move(stream).str();
}

void Load(const std::string& bytes, InputArchive& archive, at::Device device = at::kCPU) {
  archive.load_from(bytes.data(), bytes.size(), device);
}

Fields FieldsIn(InputArchive& archive) {
  Fields fields;
  for (const std::string& key : archive.keys()) archive.read(key, fields[key]);
  return fields;
}

// Returns the values of a state by name. Its tensors are copies on the CPU.
Fields FieldsOf(const OptimizerParamState& state) {
  OutputArchive out;
  state.serialize(out);
  InputArchive in;
  Load(BytesOf(out), in);
  return FieldsIn(in);
}

// Sets the values of `state`, an object of the right type. Its tensors are then on `device`.
void SetFields(const Fields& fields, at::Device device, OptimizerParamState& state) {
  OutputArchive out;
  for (const auto& [name, value] : fields) out.write(name, value);
  InputArchive in;
  Load(BytesOf(out), in, device);
  state.serialize(in);
}

// Returns a state of the type that the optimizer uses, from a step of one element. Null: a step
// makes no state. `options` null: the optimizer's defaults.
std::unique_ptr<OptimizerParamState> StateOfAStep(
    const OptimizerFactory& make, std::unique_ptr<torch::optim::OptimizerOptions> options,
    at::ScalarType type) {
  at::Tensor element = at::zeros({1}, type);
  element.mutable_grad() = at::zeros_like(element);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{element});
  if (options) groups.back().set_options(std::move(options));
  const std::unique_ptr<Optimizer> optimizer = make(std::move(groups));
  optimizer->step();
  if (optimizer->state().empty()) return nullptr;
  return optimizer->state().begin()->second->clone();
}

// Returns a state of the right type for parameters of `group`. Options may have changed since the
// states were made, so that a step makes none now.
std::unique_ptr<OptimizerParamState> Prototype(const OptimizerFactory& make,
                                               const OptimizerParamGroup& group,
                                               const OptimizerParamState* example,
                                               at::ScalarType type) {
  std::unique_ptr<OptimizerParamState> state = StateOfAStep(make, group.options().clone(), type);
  if (!state && example != nullptr) state = example->clone();
  if (!state) state = StateOfAStep(make, nullptr, type);
  if (state) return state;
  throw ConfigurationError(
      "an optimizer has states of earlier steps, and neither its options of now nor its defaults "
      "make one: a ZeroRedundancyOptimizer cannot put these states together");
}

struct Part {
  int64_t begin = 0;
  int64_t end = 0;
  Fields fields;
};
using Parts = std::map<int64_t, std::vector<Part>>;  // by parameter

void ReadParts(std::string bytes, Parts& parts) {  // frees the bytes
  if (bytes.empty()) return;
  InputArchive archive;
  Load(bytes, archive);
  c10::IValue places;
  archive.read("places", places);
  const at::Tensor table = places.toTensor();
  for (int64_t row = 0; row < table.size(0); ++row) {
    InputArchive state;
    archive.read(absl::StrCat("part", row), state);
    const int64_t* place = table.const_data_ptr<int64_t>() + 3 * row;
    parts[place[0]].push_back({.begin = place[1], .end = place[2], .fields = FieldsIn(state)});
  }
}

bool IsPartTensor(const c10::IValue& value, const Part& part) {
  return value.isTensor() && value.toTensor().dim() == 1 &&
         value.toTensor().size(0) == part.end - part.begin;
}

// Returns a tensor with the memory of one element.
at::Tensor FormOf(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::zeros({}, options).expand(sizes);
}

// Writes a state without the values of its tensors.
void WriteForm(const OptimizerParamState& state, OutputArchive& archive) {
  for (const auto& [name, value] : FieldsOf(state)) {
    const bool shrinks = value.isTensor() && value.toTensor().numel() > 1;
    if (shrinks) {
      const at::Tensor& tensor = value.toTensor();
      archive.write(name, c10::IValue(FormOf(tensor.sizes(), tensor.options())));
    } else {
      archive.write(name, value);
    }
  }
}

// Calls visit(number, group, parameter) for the parameters of an optimizer, in order.
template <typename Visit>
void ForEachParameter(const Optimizer& optimizer, const Visit& visit) {
  int64_t number = 0;
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) visit(number++, group, parameter);
  }
}

// Puts the parts of one parameter together.
Fields JoinParts(const std::vector<Part>& parts, const at::Tensor& parameter,
                 StateContent content) {
  const Part& first = parts.front();
  Fields joined = first.fields;
  for (auto& [name, value] : joined) {
    const bool whole =
        parts.size() == 1 && value.isTensor() && value.toTensor().sizes() == parameter.sizes();
    if (whole || !IsPartTensor(value, first)) continue;
    const at::TensorOptions options = value.toTensor().options();
    const bool form = content == StateContent::kForms;
    const at::Tensor tensor =
        form ? FormOf(parameter.sizes(), options)
             : at::empty_strided(parameter.sizes(), parameter.strides(), options);
    int64_t found = 0;
    for (const Part& part : parts) {
      const auto field = part.fields.find(name);
      if (field == part.fields.end() || !IsPartTensor(field->second, part)) continue;
      if (!form) FlatView(tensor, part.begin, part.end).copy_(field->second.toTensor());
      found += part.end - part.begin;
    }
    if (found != parameter.numel()) {
      throw ConfigurationError(absl::StrCat(
          "the optimizer's value \"", name, "\" exists for ", found, " of ", parameter.numel(),
          " elements of a parameter: its gradient was not defined on all ranks alike"));
    }
    value = tensor;
  }
  return joined;
}

}  // namespace

std::string StateBytes(const std::vector<StatePart>& parts, StateContent content) {
  const at::NoGradGuard no_grad;
  OutputArchive archive;
  std::vector<int64_t> places;
  int64_t row = 0;
  for (const StatePart& part : parts) {
    if (part.state == nullptr) continue;
    OutputArchive state(archive.compilation_unit());
    if (content == StateContent::kValues) {
      part.state->serialize(state);
    } else {
      WriteForm(*part.state, state);
    }
    archive.write(absl::StrCat("part", row++), state);
    places.insert(places.end(), {part.parameter, part.begin, part.end});
  }
  archive.write("places", c10::IValue(at::tensor(places, at::kLong).view({row, 3})));
  return BytesOf(archive);
}

void AssembleState(std::vector<std::string> bytes, const OptimizerFactory& make,
                   const OptimizerParamState* example, Optimizer& whole, StateContent content) {
  const at::NoGradGuard no_grad;
  Parts parts;
  for (std::string& text : bytes) ReadParts(std::move(text), parts);
  whole.state().clear();
  std::map<std::pair<const OptimizerParamGroup*, at::ScalarType>,
           std::unique_ptr<OptimizerParamState>>
      prototypes;
  ForEachParameter(
      whole, [&](int64_t number, const OptimizerParamGroup& group, const at::Tensor& parameter) {
        const auto found = parts.extract(number);  // ends with this call
        if (found.empty()) return;
        const at::ScalarType type = parameter.scalar_type();
        std::unique_ptr<OptimizerParamState>& prototype = prototypes[{&group, type}];
        if (!prototype) prototype = Prototype(make, group, example, type);
        std::unique_ptr<OptimizerParamState> state = prototype->clone();
        SetFields(JoinParts(found.mapped(), parameter, content), at::kCPU, *state);
        whole.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
      });
}

namespace {

// Returns the bytes that the tensors of a state have, or would have with values.
int64_t TensorBytesOf(const OptimizerParamState& state) {
  int64_t bytes = 0;
  for (const auto& [name, value] : FieldsOf(state)) {
    if (!value.isTensor()) continue;
    bytes += value.toTensor().numel() * static_cast<int64_t>(value.toTensor().element_size());
  }
  return bytes;
}

// Sends the states of parameters [range.first, range.second), and gives `whole` those that this
// rank needs. Returns the most bytes of texts that this rank held.
int64_t FillBatch(ProcessGroup& group, std::pair<int64_t, int64_t> range,
                  const std::vector<StatePart>& mine, const std::vector<bool>& needed,
                  Optimizer& whole) {
  const auto begin = needed.begin() + range.first;
  const auto end = needed.begin() + range.second;
  const bool keep = std::find(begin, end, true) != end;
  std::vector<StatePart> sent;
  for (const StatePart& part : mine) {
    if (part.parameter >= range.first && part.parameter < range.second) sent.push_back(part);
  }
  Parts parts;
  int64_t held = 0;  // the values of parts take the place of their texts
  int64_t most = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    std::string text;
    if (rank == group.rank() && !sent.empty()) text = StateBytes(sent);
    BroadcastText(group, rank, text, keep);
    const auto size = static_cast<int64_t>(text.size());
    most = std::max(most, held + size);
    if (!keep) continue;
    held += size;
    ReadParts(std::move(text), parts);
    std::erase_if(parts, [&](const auto& entry) { return !needed[entry.first]; });
  }
  ForEachParameter(whole,
                   [&](int64_t number, const OptimizerParamGroup&, const at::Tensor& parameter) {
                     const auto found = parts.extract(number);  // ends with this call
                     if (found.empty()) return;
                     SetFields(JoinParts(found.mapped(), parameter, StateContent::kValues),
                               at::kCPU, *whole.state().at(parameter.unsafeGetTensorImpl()));
                   });
  return most;
}

}  // namespace

int64_t FillStates(ProcessGroup& group, const std::vector<StatePart>& mine,
                   const std::vector<bool>& needed, Optimizer& whole, const FillLimits& limits) {
  const at::NoGradGuard no_grad;
  // Equal on all ranks, because the form of the state is.
  std::vector<int64_t> bytes;
  ForEachParameter(
      whole, [&](int64_t /*number*/, const OptimizerParamGroup&, const at::Tensor& parameter) {
        const auto found = whole.state().find(parameter.unsafeGetTensorImpl());
        bytes.push_back(found == whole.state().end() ? 0 : TensorBytesOf(*found->second));
      });
  const auto count = static_cast<int64_t>(bytes.size());
  int64_t most = 0;
  for (int64_t begin = 0, end = 0; begin < count; begin = end) {
    int64_t batch = bytes[end++];
    while (end < count && batch + bytes[end] <= limits.batch_bytes) batch += bytes[end++];
    if (batch == 0) continue;
    most = std::max(most, FillBatch(group, {begin, end}, mine, needed, whole));
  }
  return most;
}

std::unique_ptr<OptimizerParamState> CutState(const OptimizerParamState& whole,
                                              const at::Tensor& parameter,
                                              const ShardPlan::Piece& piece) {
  const at::NoGradGuard no_grad;
  Fields fields = FieldsOf(whole);
  std::unique_ptr<OptimizerParamState> state = whole.clone();
  for (auto& [name, value] : fields) {
    if (!value.isTensor() || value.toTensor().sizes() != parameter.sizes()) continue;
    at::Tensor tensor = value.toTensor();
    if (!piece.whole) {
      tensor =
          at::empty_strided(parameter.sizes(), parameter.strides(), tensor.options()).copy_(tensor);
      tensor = PieceOf(tensor, piece).clone();
    }
    value = tensor;
  }
  SetFields(fields, parameter.device(), *state);
  return state;
}

std::string OptionBytes(const std::vector<OptimizerParamGroup>& groups) {
  OutputArchive archive;
  for (size_t i = 0; i < groups.size(); ++i) {
    OutputArchive options(archive.compilation_unit());
    groups[i].options().serialize(options);
    archive.write(absl::StrCat("group", i), options);
  }
  return BytesOf(archive);
}

void SetOptions(const std::string& bytes, std::vector<OptimizerParamGroup>& groups) {
  InputArchive archive;
  Load(bytes, archive);
  for (size_t i = 0; i < groups.size(); ++i) {
    InputArchive options;
    archive.read(absl::StrCat("group", i), options);
    groups[i].options().serialize(options);
  }
}

void BroadcastText(ProcessGroup& group, int root, std::string& text, bool keep) {
  at::Tensor size = at::full({1}, static_cast<int64_t>(text.size()), at::kLong).to(group.device());
  group.broadcast(size, root);
  const auto total = group.to_host(size).item<int64_t>();
  keep = keep || group.rank() == root;
  text.resize(keep ? total : 0);
  for (int64_t begin = 0; begin < total; begin += kRoundBytes) {
    const int64_t count = std::min(kRoundBytes, total - begin);
    at::Tensor bytes = at::empty({count}, at::kByte);
    if (group.rank() == root) {
      std::memcpy(bytes.mutable_data_ptr<uint8_t>(), text.data() + begin, count);
    }
    bytes = bytes.to(group.device());
    group.broadcast(bytes, root);
    if (!keep) continue;
    bytes = group.to_host(bytes);
    std::memcpy(text.data() + begin, bytes.const_data_ptr<uint8_t>(), count);
  }
}

std::vector<std::string> CollectTexts(ProcessGroup& group, const std::string& mine, int to) {
  std::vector<std::string> texts(group.size());
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank == group.rank()) texts[rank] = mine;
    if (rank == to) continue;  // has its own
    const bool keep = to < 0 || group.rank() == to;
    BroadcastText(group, rank, texts[rank], keep);
    if (!keep) texts[rank].clear();
  }
  return texts;
}

}  // namespace ddp::internal
