/* interrupt.c: see interrupt.h. */
#define _POSIX_C_SOURCE 200809L
#include "base/interrupt.h"

#include <signal.h>

static volatile sig_atomic_t came;

static void on_signal(int number) { came = number; }

void interrupt_catch(void)
{
    struct sigaction action = {.sa_handler = on_signal,
                               .sa_flags = (int)(SA_RESETHAND | SA_RESTART)};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

int interrupt_signal(void) { return came; }
