// The handlers of all operations, in one unit: XLA's headers take a compiler longer than what is in it.
#include "../add_norm/cpu.cc"
#include "../delta_rule/cpu.cc"
#include "../experts/cpu.cc"
#include "../linear/cpu.cc"
#include "../rms_norm/cpu.cc"
#include "../rope/cpu.cc"
#include "../row_top/cpu.cc"
#include "../tree_attention/cpu.cc"
