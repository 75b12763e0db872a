/* Preloaded into Slurm's daemons in a plain user's namespace, where one user exists and setgroups is forbidden:
 * dropping groups succeeds and does nothing. */
#include <grp.h>
#include <sys/types.h>

int setgroups(size_t count, const gid_t *groups) { return 0; }
int initgroups(const char *user, gid_t group) { return 0; }
