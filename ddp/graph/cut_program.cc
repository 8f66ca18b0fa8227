#include "ddp/graph/cut_program.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/remove_mutation.h>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/graph/cut/graph_cut.h"

namespace ddp::internal {
namespace {

namespace jit = torch::jit;

// Calls visit(value) for each value that `node`, or a node in its blocks, reads.
template <typename Visit>
void ForEachRead(const jit::Node& node, const Visit& visit) {
  for (const jit::Value* input : node.inputs()) visit(input);
  for (const jit::Block* block : node.blocks()) {
    for (const jit::Node* inner : block->nodes()) ForEachRead(*inner, visit);
    for (const jit::Value* output : block->outputs()) visit(output);
  }
}

std::optional<int64_t> BytesOfMib(const std::optional<double>& mib) {
  if (!mib.has_value()) return std::nullopt;
  if (!(*mib > 0)) throw ConfigurationError(absl::StrCat("a bucket cap of ", *mib, " MiB"));
  return std::max<int64_t>(1, static_cast<int64_t>(*mib * 1024 * 1024));
}

std::vector<GraphCutParameter> CutParameters(const std::vector<ModelParameter>& parameters) {
  std::vector<GraphCutParameter> result;
  for (const ModelParameter& parameter : parameters) {
    result.push_back({.bytes = static_cast<int64_t>(parameter.tensor.nbytes()),
                      .ignored = parameter.excluded,
                      .frozen = !parameter.tensor.requires_grad()});
  }
  return result;
}

}  // namespace

struct CutProgram::Builder {
  Builder(CutProgram& program, CapturedGraph& captured,
          const std::vector<ModelParameter>& parameters)
      : program(program), graph(*captured.graph) {
    for (jit::Node* node : graph.nodes()) {
      if (node->kind() == c10::prim::Constant) continue;
      node_index[node] = static_cast<int>(nodes.size());
      nodes.push_back(node);
    }
    std::unordered_map<const c10::TensorImpl*, int> index_of;
    for (size_t i = 0; i < parameters.size(); ++i) {
      index_of[parameters[i].tensor.unsafeGetTensorImpl()] = static_cast<int>(i);
    }
    for (size_t i = 0; i < graph.inputs().size(); ++i) {
      slot_of[graph.inputs()[i]] = static_cast<int>(i);
      if (i < captured.arguments) continue;
      const StateInput& input = captured.state.at(i - captured.arguments);
      const c10::IValue value = input.Read();
      if (!value.isTensor()) continue;
      const auto found = index_of.find(value.toTensor().unsafeGetTensorImpl());
      if (found != index_of.end()) parameter_of[graph.inputs()[i]] = found->second;
    }
    program.slots_ = graph.inputs().size();
  }

  // Returns the graph's operations as the core knows them.
  std::vector<GraphCutNode> CutNodes() const {
    std::unordered_set<const jit::Value*> outputs(graph.outputs().begin(), graph.outputs().end());
    std::vector<GraphCutNode> result(nodes.size());
    int open_regions = 0;  // prim::Enter without its prim::Exit
    for (size_t i = 0; i < nodes.size(); ++i) {
      GraphCutNode& node = result[i];
      ForEachRead(*nodes[i], [&](const jit::Value* value) {
        if (const auto it = parameter_of.find(value); it != parameter_of.end()) {
          node.parameters.push_back(it->second);
        }
        const auto it = node_index.find(value->node());
        if (it != node_index.end() && it->second < static_cast<int>(i)) {
          node.inputs.push_back(it->second);
        }
      });
      for (const jit::Value* output : nodes[i]->outputs()) {
        node.is_output = node.is_output || outputs.count(output) != 0;
      }
      node.may_begin = open_regions == 0;
      if (nodes[i]->kind() == c10::prim::Enter) ++open_regions;
      if (nodes[i]->kind() == c10::prim::Exit) --open_regions;
    }
    return result;
  }

  int SlotOf(const jit::Value* value) {
    const auto [it, added] = slot_of.try_emplace(value, static_cast<int>(program.slots_));
    if (added) ++program.slots_;
    return it->second;
  }

  // Copies the nodes [first, end) into a graph of their own. Fills `part` except its function.
  std::shared_ptr<jit::Graph> Extract(int first, int end, Part& part) {
    const auto copy = std::make_shared<jit::Graph>();
    std::unordered_map<const jit::Value*, jit::Value*> copied;
    const std::function<jit::Value*(jit::Value*)> translate = [&](jit::Value* value) {
      const auto it = copied.find(value);
      if (it != copied.end()) return it->second;
      if (value->node()->kind() == c10::prim::Constant) {
        jit::Node* constant = copy->createClone(value->node(), translate);
        copy->prependNode(constant);
        return copied[value] = constant->output();
      }
      jit::Value* input = copy->addInput();
      input->setType(value->type());
      part.inputs.push_back({SlotOf(value), /*last=*/false});
      return copied[value] = input;
    };
    for (int i = first; i < end; ++i) {
      jit::Node* clone = copy->createClone(nodes[i], translate);
      copy->appendNode(clone);
      for (size_t j = 0; j < nodes[i]->outputs().size(); ++j) {
        copied[nodes[i]->outputs()[j]] = clone->outputs()[j];
      }
    }
    for (int i = first; i < end; ++i) {
      for (jit::Value* output : nodes[i]->outputs()) {
        if (!ReadAfter(output, end)) continue;
        copy->registerOutput(copied.at(output));
        part.outputs.push_back(SlotOf(output));
      }
    }
    return copy;
  }

  std::vector<std::string> InputNames(const CapturedGraph& captured, const Part& part) const {
    std::vector<std::string> names;
    for (const auto& [slot, last] : part.inputs) {
      const size_t index = slot;
      const bool is_state = index >= captured.arguments && index < graph.inputs().size();
      names.push_back(is_state ? captured.state[index - captured.arguments].name : "");
    }
    return names;
  }

  // Returns for each node whether a part must begin there; see PieceBackend::derives_groups().
  std::vector<bool> Fences() const {
    std::vector<bool> fences(nodes.size(), false);
    for (const jit::Value* input : graph.inputs()) AddFences(*input, fences);
    for (const jit::Node* node : nodes) {
      for (const jit::Value* output : node->outputs()) AddFences(*output, fences);
    }
    // A region that may not be cut is one part.
    const std::vector<GraphCutNode> cut_nodes = CutNodes();
    for (size_t i = 0; i < nodes.size(); ++i) fences[i] = fences[i] && cut_nodes[i].may_begin;
    return fences;
  }

  // Separates the nodes that read `value` when it gets three gradients or more. (The sum of two
  // does not depend on their order.)
  void AddFences(const jit::Value& value, std::vector<bool>& fences) const {
    if (!value.type()->isSubtypeOf(*c10::TensorType::get()) || !value.requires_grad()) return;
    std::set<int> readers;  // the graph's end counts as a node behind the last one
    for (const jit::Use& use : value.uses()) {
      const jit::Node* user = TopLevel(use.user);
      const auto it = node_index.find(user);
      readers.insert(it == node_index.end() ? static_cast<int>(nodes.size()) : it->second);
    }
    if (readers.size() < 3) return;
    for (const int reader : readers) {
      if (reader != *readers.begin() && reader < std::ssize(nodes)) fences[reader] = true;
    }
  }

  // Returns the node of the graph's own block that is `node` or contains it.
  const jit::Node* TopLevel(const jit::Node* node) const {
    while (node->owningBlock() != graph.block()) node = node->owningBlock()->owningNode();
    return node;
  }

  // True when the graph returns `value`, or a node from `end` on reads it.
  bool ReadAfter(const jit::Value* value, int end) const {
    for (const jit::Use& use : value->uses()) {
      const auto it = node_index.find(TopLevel(use.user));
      if (it == node_index.end() || it->second >= end) return true;
    }
    return false;
  }

  CutProgram& program;
  jit::Graph& graph;
  std::vector<jit::Node*> nodes;  // without constants
  std::unordered_map<const jit::Node*, int> node_index;
  std::unordered_map<const jit::Value*, int> slot_of;
  std::unordered_map<const jit::Value*, int> parameter_of;
};

namespace {

GraphCut Cut(const std::vector<GraphCutNode>& nodes, const std::vector<ModelParameter>& parameters,
             const GraphOptions& options, const std::string& name, bool tolerant) {
  const std::vector<GraphCutParameter> sizes = CutParameters(parameters);
  const GraphCutMode mode = options.mode;
  if (!options.cuts.has_value()) {
    GraphCutCaps caps{.first_cap_bytes = BytesOfMib(options.first_bucket_cap_mb),
                      .cap_bytes = BytesOfMib(options.bucket_cap_mb)};
    if (mode == GraphCutMode::kParity) caps.first_cap_bytes = kDefaultFirstCapBytes;
    const auto cut = CutAtBuckets(nodes, sizes, mode, caps);
    CHECK(cut.ok()) << cut.status();
    return *cut;
  }
  auto cut = CutBefore(nodes, sizes, mode, *options.cuts);
  if (cut.ok()) return *cut;
  const std::string problem =
      absl::StrCat("the cuts do not fit the graph of ", name, ": ", cut.status().message());
  if (!tolerant) throw ConfigurationError(problem);
  LOG(WARNING) << problem << "; this graph runs in one piece";
  cut = CutBefore(nodes, sizes, mode, {});
  CHECK(cut.ok()) << cut.status();
  return *cut;
}

}  // namespace

CutProgram::CutProgram(CapturedGraph captured, const std::vector<ModelParameter>& parameters,
                       const GraphOptions& options, bool tolerant)
    : name_(captured.name), arguments_(captured.arguments) {
  // TorchScript has no derivative of an operation in place. Where nothing else can see its value,
  // the operation that makes a new value has the same bits.
  jit::RemoveTensorMutation(captured.graph);
  Builder builder(*this, captured, parameters);
  const GraphCut cut = Cut(builder.CutNodes(), parameters, options, name_, tolerant);
  const std::shared_ptr<PieceBackend> backend =
      options.backend != nullptr ? options.backend : graph_executor_backend();
  std::vector<bool> fences(builder.nodes.size(), false);
  if (backend->derives_groups()) fences = builder.Fences();
  for (int i = 0; i < std::ssize(cut.pieces); ++i) {
    const GraphCutPiece& piece = cut.pieces[i];
    AddPiece(builder, captured, piece, i, static_cast<int>(cut.pieces.size()), fences, *backend);
    PieceRow row{.nodes = piece.end_node - piece.first_node,
                 .bytes = piece.bytes,
                 .extensions = piece.extensions};
    for (const int parameter : piece.parameters) {
      row.parameters.push_back(parameters[parameter].name);
    }
    rows_.push_back(std::move(row));
  }
  std::unordered_set<int> read;  // by the graph's outputs and by later pieces
  for (const jit::Value* output : builder.graph.outputs()) {
    outputs_.push_back(builder.SlotOf(output));
    read.insert(outputs_.back());
    if (const auto constant = jit::toIValue(output)) {
      constants_.push_back({outputs_.back(), *constant});
    }
  }
  for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) {
    for (auto& [slot, last] : part->inputs) last = read.insert(slot).second;
  }
  state_ = std::move(captured.state);
  baked_ = std::move(captured.baked);
}

// Compiles a piece, in parts that begin at the fences.
void CutProgram::AddPiece(Builder& builder, const CapturedGraph& captured, const GraphCutPiece& cut,
                          int index, int count, const std::vector<bool>& fences,
                          PieceBackend& backend) {
  const std::string name = absl::StrCat(name_, ".piece", index);
  for (int first = cut.first_node, part = 0; first < cut.end_node; ++part) {
    int end = first + 1;
    while (end < cut.end_node && !fences[end]) ++end;
    Part added{.name = part == 0 ? name : absl::StrCat(name, ".part", part)};
    GraphPiece compiled{.name = added.name, .index = index, .count = count};
    compiled.graph = builder.Extract(first, end, added);
    compiled.input_names = builder.InputNames(captured, added);
    added.run = backend.Compile(compiled);
    if (added.run == nullptr) {
      throw ConfigurationError(absl::StrCat("the backend has no function for ", added.name));
    }
    parts_.push_back(std::move(added));
    first = end;
  }
}

CutProgram::~CutProgram() = default;

std::vector<c10::IValue> CutProgram::Run(std::vector<c10::IValue> arguments) const {
  if (arguments.size() != arguments_) {
    throw ConfigurationError(absl::StrCat("the forward of ", name_, " takes ", arguments_,
                                          " arguments, not ", arguments.size()));
  }
  std::vector<c10::IValue> slots = std::move(arguments);
  slots.resize(slots_);
  for (size_t i = 0; i < state_.size(); ++i) slots[arguments_ + i] = state_[i].Read();
  for (const auto& [slot, value] : constants_) slots[slot] = value;
  for (const Part& part : parts_) {
    std::vector<c10::IValue> values;
    values.reserve(part.inputs.size());
    for (const auto& [slot, last] : part.inputs) {
      values.push_back(last ? std::move(slots[slot]) : slots[slot]);
    }
    values = part.run(std::move(values));
    if (values.size() != part.outputs.size()) {
      throw ConfigurationError(absl::StrCat("the backend returned ", values.size(), " values for ",
                                            part.name, ", whose graph has ", part.outputs.size()));
    }
    for (size_t i = 0; i < values.size(); ++i) slots[part.outputs[i]] = std::move(values[i]);
  }
  std::vector<c10::IValue> results;
  for (const int slot : outputs_) results.push_back(slots[slot]);
  return results;
}

bool CutProgram::Holds() const {
  return std::all_of(baked_.begin(), baked_.end(),
                     [](const BakedAttribute& baked) { return baked.Holds(); });
}

}  // namespace ddp::internal
