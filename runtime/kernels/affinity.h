// Which cores the threads of a team run on.
#pragma once

#include <vector>

namespace ropeway {

// One core a thread, neighbours of one NUMA node next to each other, when a team of `size` takes
// every core that this process may use (hyperthreads counted or not). Else none: somebody else may
// want the cores that are left, and two teams mustn't choose the same ones. None as well where the
// system can't say.
std::vector<int> cores_for_team(int size);

// Binds the calling thread to a core for good.
void stay_on(int core);

// Moves the calling thread to a core, if it may run there and isn't there; it stays free to go.
void move_to(int core);

}  // namespace ropeway
