/*
 * This process and its machine: the clock, the processors, forks, and the files that are the
 * process's own.
 */
#ifndef OB_BASE_PROCESS_H
#define OB_BASE_PROCESS_H

#include <stdint.h>

/* Seconds since some moment in the past; never goes back. A call takes some 20 nanoseconds. */
double ob_seconds(void);

/* Returns a number that is the same on all hosts that run on one kernel, as containers and emulated
 * hosts may. It comes from Linux's boot ID; 0: not known. */
uint64_t ob_machine_number(void);

/* Returns the number of the machine's CPUs. */
int ob_machine_processors(void);

/* --- Files of this process alone ---------------------------------------------------------------*/

/* A forked child inherits the parent's open files: as long as the child runs, the system neither
 * closes the connections of a killed parent nor releases its locks. So a child closes the files
 * that are registered here at once, and cannot use its copies of the parent's objects. */

/* Registers an open file and returns it; a negative number is returned without registration. */
int ob_own_file(int file);

/* Closes a registered file. A negative number is fine. */
void ob_own_close(int file);

/* Returns the number of forks between the process that loaded the library and this process. An
 * object that was created when this number was different belongs to a parent process. */
unsigned ob_forks(void);

#endif
