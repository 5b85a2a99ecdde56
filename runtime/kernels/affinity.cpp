#include "affinity.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <tuple>

namespace ropeway {
namespace {

struct Core {
    int node, sibling, number;  // sibling: 0 for the first hyperthread of a physical core
    bool operator<(const Core& other) const {
        return std::tie(sibling, node, number) < std::tie(other.sibling, other.node, other.number);
    }
};

// The first number in a file of /sys, or `otherwise`.
int first_number(const std::string& path, int otherwise) {
    std::FILE* file = std::fopen(path.c_str(), "r");
    if (file == nullptr) return otherwise;
    int number = otherwise;
    if (std::fscanf(file, "%d", &number) != 1) number = otherwise;
    std::fclose(file);
    return number;
}

int node_of(const std::string& cpu) {
    for (int node = 0; node < 64; ++node) {
        const std::string path = cpu + "/node" + std::to_string(node) + "/cpulist";
        std::FILE* file = std::fopen(path.c_str(), "r");
        if (file == nullptr) continue;
        std::fclose(file);
        return node;
    }
    return 0;
}

std::vector<Core> usable_cores() {
    std::vector<Core> cores;
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return cores;
    for (int number = 0; number < CPU_SETSIZE; ++number) {
        if (!CPU_ISSET(number, &allowed)) continue;
        const std::string cpu = "/sys/devices/system/cpu/cpu" + std::to_string(number);
        const int first = first_number(cpu + "/topology/thread_siblings_list", number);
        // A core whose first hyperthread is forbidden counts by the one that is allowed.
        const bool second = first != number && CPU_ISSET(first, &allowed);
        cores.push_back({node_of(cpu), second ? 1 : 0, number});
    }
    std::sort(cores.begin(), cores.end());
    return cores;
}

}  // namespace

std::vector<int> cores_for_team(int size) {
    const std::vector<Core> cores = usable_cores();
    const auto physical = std::count_if(cores.begin(), cores.end(),
                                        [](const Core& core) { return core.sibling == 0; });
    std::vector<int> numbers;
    if (size != physical && static_cast<size_t>(size) != cores.size()) return numbers;
    for (int i = 0; i < size; ++i) numbers.push_back(cores[static_cast<size_t>(i)].number);
    return numbers;
}

void stay_on(int core) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    // A refusal (a container's) leaves the thread where it was, which costs speed alone.
    pthread_setaffinity_np(pthread_self(), sizeof one, &one);
}

void move_to(int core) {
    if (sched_getcpu() == core) return;
    cpu_set_t before;
    if (pthread_getaffinity_np(pthread_self(), sizeof before, &before) != 0) return;
    if (!CPU_ISSET(core, &before)) return;
    stay_on(core);
    pthread_setaffinity_np(pthread_self(), sizeof before, &before);
}

}  // namespace ropeway

#else

namespace ropeway {
std::vector<int> cores_for_team(int) { return {}; }
void stay_on(int) {}
void move_to(int) {}
}  // namespace ropeway

#endif
