#include "launcher/process/numa_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

// The /sys, /proc and /dev of an invented host.
class InventedHost {
 public:
  explicit InventedHost(const std::string& name) : root_(::testing::TempDir() + "/" + name) {
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
  }

  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path whole = root_ + path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text << "\n";
  }

  // Hardware threads of a core are `id` and `id + cores`, as most kernels number them.
  void AddCpu(int id, int socket, const std::string& siblings, const std::string& cache) const {
    const std::string cpu = absl::StrCat("/sys/devices/system/cpu/cpu", id);
    Write(cpu + "/topology/physical_package_id", absl::StrCat(socket));
    Write(cpu + "/topology/thread_siblings_list", siblings);
    Write(cpu + "/cache/index0/level", "1");
    Write(cpu + "/cache/index0/shared_cpu_list", siblings);
    Write(cpu + "/cache/index3/level", "3");
    Write(cpu + "/cache/index3/shared_cpu_list", cache);
  }

  void AddNode(int node, const std::string& cpus) const {
    Write(absl::StrCat("/sys/devices/system/node/node", node, "/cpulist"), cpus);
  }

  void AddGpu(const std::string& address, int minor, int node) const {
    Write(absl::StrCat("/proc/driver/nvidia/gpus/", address, "/information"),
          absl::StrCat("Model: \t\t Invented\nGPU UUID: \t GPU-", minor, "abc\nDevice Minor: \t ",
                       minor));
    Write(absl::StrCat("/sys/bus/pci/devices/", address, "/numa_node"), absl::StrCat(node));
    Write(absl::StrCat("/dev/nvidia", minor), "");
  }

  absl::StatusOr<CpuTopology> Read(const std::set<int>& allowed,
                                   std::optional<std::string> visible = std::nullopt) const {
    return ReadCpuTopology(
        {.root = root_, .allowed = allowed, .cuda_visible_devices = std::move(visible)});
  }

 private:
  const std::string root_;
};

std::set<int> Range(int count) {
  std::set<int> result;
  for (int i = 0; i < count; ++i) result.insert(i);
  return result;
}

// Two sockets with two NUMA nodes each. A node has four cores in two core complexes, and a core has
// two hardware threads: node n has CPUs 4n to 4n + 3 and 16 + 4n to 16 + 4n + 3. The GPUs lie at
// the far ends, in the other order.
InventedHost TwoSockets(const std::string& name) {
  InventedHost host(name);
  host.Write("/sys/devices/system/cpu/online", "0-31");
  for (int id = 0; id < 32; ++id) {
    const int core = id % 16;
    const int complex = core / 2 * 2;
    host.AddCpu(id, core / 8, absl::StrCat(core, ",", core + 16),
                absl::StrCat(complex, "-", complex + 1, ",", complex + 16, "-", complex + 17));
  }
  for (int node = 0; node < 4; ++node) {
    host.AddNode(node,
                 absl::StrCat(4 * node, "-", 4 * node + 3, ",", 16 + 4 * node, "-", 19 + 4 * node));
  }
  return host;
}

InventedHost WithGpus(const std::string& name) {
  InventedHost host = TwoSockets(name);
  host.AddGpu("0000:17:00.0", 1, 3);
  host.AddGpu("0000:2a:00.0", 0, 0);
  return host;
}

std::vector<std::vector<int>> Plan(const CpuTopology& topology, NumaBinding binding, int nproc) {
  const auto plan = PlanNuma(topology, binding, nproc);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *plan : std::vector<std::vector<int>>();
}

TEST(CpuTopologyTest, ReadsWhereEveryCpuIs) {
  const auto topology = TwoSockets("reads").Read(Range(32));
  ASSERT_TRUE(topology.ok()) << topology.status();
  ASSERT_THAT(topology->cpus, SizeIs(32));
  const CpuTopology::Cpu& cpu = topology->cpus[27];
  EXPECT_EQ(cpu.id, 27);
  EXPECT_EQ(cpu.node, 2);
  EXPECT_EQ(cpu.socket, 1);
  EXPECT_EQ(cpu.core, 11);
  EXPECT_EQ(cpu.cache, 10);
  EXPECT_THAT(topology->gpu_nodes, IsEmpty());
}

TEST(CpuTopologyTest, GpusInTheOrderOfTheirAddressesAsFarAsTheyAreSeen) {
  const InventedHost host = WithGpus("gpus");
  EXPECT_THAT(host.Read(Range(32))->gpu_nodes, ElementsAre(3, 0));
  EXPECT_THAT(host.Read(Range(32), "1,0")->gpu_nodes, ElementsAre(0, 3));
  EXPECT_THAT(host.Read(Range(32), "1, 7, 0")->gpu_nodes, ElementsAre(0));
  EXPECT_THAT(host.Read(Range(32), "GPU-1, MIG-x, GPU-9")->gpu_nodes, ElementsAre(3, -1, -1));
  EXPECT_THAT(host.Read(Range(32), "")->gpu_nodes, IsEmpty());
  // A container may have the driver's files but not this device.
  host.Write("/proc/driver/nvidia/gpus/0000:01:00.0/information", "Device Minor: \t 5");
  EXPECT_THAT(host.Read(Range(32))->gpu_nodes, ElementsAre(3, 0));
}

TEST(CpuTopologyTest, AKernelWithoutNumaHasOneNode) {
  InventedHost host("flat");
  host.Write("/sys/devices/system/cpu/online", "0-1");
  host.AddCpu(0, 0, "0", "0-1");
  host.AddCpu(1, 0, "1", "0-1");
  const auto topology = host.Read(Range(2));
  ASSERT_TRUE(topology.ok()) << topology.status();
  EXPECT_THAT(Plan(*topology, NumaBinding::kNode, 2), Each(ElementsAre(0, 1)));
  EXPECT_THAT(Plan(*topology, NumaBinding::kExclusive, 2),
              ElementsAre(ElementsAre(0), ElementsAre(1)));
}

TEST(CpuTopologyTest, WhatCannotBeReadIsNamed) {
  InventedHost host("broken");
  EXPECT_THAT(std::string(host.Read(Range(2)).status().message()), HasSubstr("cpu/online"));
  host.Write("/sys/devices/system/cpu/online", "0-x");
  EXPECT_THAT(std::string(host.Read(Range(2)).status().message()),
              AllOf(HasSubstr("cpu/online"), HasSubstr("0-x")));
  host.Write("/sys/devices/system/cpu/online", "0-1");
  EXPECT_THAT(std::string(host.Read(Range(2)).status().message()),
              HasSubstr("cpu0/topology/physical_package_id"));
  EXPECT_THAT(std::string(host.Read({7}).status().message()), HasSubstr("no CPU that we may run"));
}

TEST(CpuTopologyTest, ListsOfCpus) {
  EXPECT_THAT(*ParseCpuList("0-2,8,10-11,1"), ElementsAre(0, 1, 2, 8, 10, 11));
  EXPECT_THAT(*ParseCpuList(""), IsEmpty());
  for (const char* bad : {"x", "1-", "-1", "3-1", "1-2-3", "0-99999999", "1,,2"}) {
    EXPECT_FALSE(ParseCpuList(bad).ok()) << bad;
  }
}

TEST(CpuTopologyTest, ThisHostCanBeReadOrSaysWhy) {
  const auto topology = ReadCpuTopologyOfThisHost();
  if (topology.ok()) {
    EXPECT_THAT(topology->cpus, Not(IsEmpty()));
  } else {
    EXPECT_THAT(std::string(topology.status().message()), HasSubstr("/"));
  }
}

TEST(NumaPlanTest, WithoutGpusRanksSpreadOverTheNodes) {
  const CpuTopology topology = *TwoSockets("spread").Read(Range(32));
  const auto plan = Plan(topology, NumaBinding::kNode, 4);
  ASSERT_THAT(plan, SizeIs(4));
  EXPECT_THAT(plan[0], ElementsAre(0, 1, 2, 3, 16, 17, 18, 19));
  EXPECT_THAT(plan[3], ElementsAre(12, 13, 14, 15, 28, 29, 30, 31));
  // Two ranks are not placed on neighbouring nodes.
  EXPECT_THAT(Plan(topology, NumaBinding::kNode, 2)[1], ElementsAre(8, 9, 10, 11, 24, 25, 26, 27));
  // Eight ranks: two per node, neighbours together.
  const auto eight = Plan(topology, NumaBinding::kNode, 8);
  EXPECT_EQ(eight[0], eight[1]);
  EXPECT_NE(eight[1], eight[2]);
}

TEST(NumaPlanTest, ARankIsAtHomeWhereItsGpuIs) {
  const CpuTopology topology = *WithGpus("home").Read(Range(32));
  const auto plan = Plan(topology, NumaBinding::kNode, 3);
  EXPECT_THAT(plan[0], ElementsAre(12, 13, 14, 15, 28, 29, 30, 31));
  EXPECT_THAT(plan[1], ElementsAre(0, 1, 2, 3, 16, 17, 18, 19));
  EXPECT_EQ(plan[2], plan[0]);  // shares the first GPU
}

TEST(NumaPlanTest, ASocketIsAllOfItsNodes) {
  const CpuTopology topology = *WithGpus("socket").Read(Range(32));
  const auto plan = Plan(topology, NumaBinding::kSocket, 2);
  EXPECT_THAT(plan[0], ElementsAre(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
  EXPECT_THAT(plan[1], ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23));
}

TEST(NumaPlanTest, ExclusiveSharesAreWholeCoresAndNobodyElses) {
  const CpuTopology topology = *TwoSockets("exclusive").Read(Range(32));
  const auto plan = Plan(topology, NumaBinding::kExclusive, 12);
  ASSERT_THAT(plan, SizeIs(12));
  std::set<int> taken;
  for (const std::vector<int>& cpus : plan) {
    EXPECT_THAT(cpus, Not(IsEmpty()));
    for (const int cpu : cpus) {
      EXPECT_TRUE(taken.insert(cpu).second) << cpu;
      // The other thread of the core is in the same share.
      EXPECT_THAT(cpus, ::testing::Contains((cpu + 16) % 32));
    }
  }
  EXPECT_THAT(taken, SizeIs(32));
  const auto too_many = PlanNuma(topology, NumaBinding::kExclusive, 17);
  EXPECT_THAT(std::string(too_many.status().message()),
              AllOf(HasSubstr("5 workers"), HasSubstr("NUMA node 0"), HasSubstr("4 cores")));
}

TEST(NumaPlanTest, ACoreComplexPerRank) {
  const CpuTopology topology = *TwoSockets("complex").Read(Range(32));
  const auto plan = Plan(topology, NumaBinding::kCoreComplex, 12);
  EXPECT_THAT(plan[0], ElementsAre(0, 1, 16, 17));
  EXPECT_THAT(plan[1], ElementsAre(2, 3, 18, 19));
  EXPECT_EQ(plan[2], plan[0]);  // more ranks than complexes in the node: shared
  EXPECT_THAT(plan[3], ElementsAre(4, 5, 20, 21));
}

TEST(NumaPlanTest, OnlyCpusThatWeMayRunOn) {
  // A container with three cores of node 1 and one of node 2, of which one complex is larger.
  const CpuTopology topology = *TwoSockets("limits").Read({4, 6, 7, 8});
  EXPECT_THAT(Plan(topology, NumaBinding::kNode, 2),
              ElementsAre(ElementsAre(4, 6, 7), ElementsAre(8)));
  EXPECT_THAT(Plan(topology, NumaBinding::kCoreComplex, 2),
              ElementsAre(ElementsAre(6, 7), ElementsAre(8)));
  // A GPU's node is no home if this process may run on none of its CPUs.
  CpuTopology far = topology;
  far.gpu_nodes = {3};
  EXPECT_THAT(Plan(far, NumaBinding::kNode, 1), ElementsAre(ElementsAre(4, 6, 7)));
}

TEST(NumaPlanTest, NoBindingIsNoPlan) {
  EXPECT_THAT(Plan(*TwoSockets("none").Read(Range(32)), NumaBinding::kNone, 4), IsEmpty());
}

}  // namespace
}  // namespace ddp::launcher
