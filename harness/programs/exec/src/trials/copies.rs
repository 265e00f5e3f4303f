//! [`Copies`]: runs that begin as copies of a program that has imported everything (`copies.py`).
//!
//! The first run starts the program. Before it uses the GPU, it forks a template, which waits, and
//! continues. Each further run is a fork of the template, which becomes a child of this process.

use std::ffi::OsString;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Mutex, MutexGuard};
use std::{fs, path::PathBuf, process, thread, time::Duration};

use harness_allocator::sync::lock;
use harness_gpu_settings::settings::{UNLOADED, Values};

use super::{OUTPUTS, Observed, Trial};
use crate::files::{COPIES, hook_folder};
use crate::launch::{EndedProgram, Launch, Prepared};
use crate::{machine::Machine, process::Started, torch_record::Caller};

const SCRIPT: &str = include_str!("../copies.py");
/// How long a template may take to fork.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub struct Copies(Mutex<State>);

#[derive(Debug)]
enum State {
    /// The next run starts the program, imports this module early, and offers copies.
    Wanted(String),
    Offered(Template),
    /// Each run starts the program anew. The reason, if the user did not choose it, follows the
    /// words "the program".
    Refused(Option<String>),
}

#[derive(Debug)]
struct Template {
    channel: BufReader<UnixStream>,
    _process: Started,
    /// The folder of the run that it comes from, which it may still use.
    origin: PathBuf,
    kept: Option<EndedProgram>,
}

impl Copies {
    /// Copies of programs that use one simulated GPU in one process.
    pub fn wanted(launch: &Launch<'_>, first: &Observed) -> Self {
        let reason = match launch.machine {
            Machine::Real(..) => return Self::none(),
            _ if first.caller == Caller::Program => {
                "calls CUDA without PyTorch or another library that harness knows".to_owned()
            }
            _ if first.processes > 1 => format!("uses the GPU in {} processes", first.processes),
            Machine::Simulated(settings) if settings.devices > 1 => {
                "may use several GPUs".to_owned()
            }
            Machine::Simulated(settings) if settings.values == Values::Cpu => {
                "runs with `--values cpu`".to_owned()
            }
            Machine::Simulated(_) if !launch.is_audited() => {
                "uses a GNU C library older than 2.35".to_owned()
            }
            Machine::Simulated(_) => {
                return Self(Mutex::new(State::Wanted(
                    first.late_import.clone().unwrap_or_default(),
                )));
            }
        };
        Self(Mutex::new(State::Refused(Some(reason))))
    }

    pub const fn none() -> Self {
        Self(Mutex::new(State::Refused(None)))
    }

    /// Returns why runs do not begin as copies, if they should.
    pub fn refusal(&self) -> Option<String> {
        if let State::Refused(reason) = &*self.lock() {
            reason.clone()
        } else {
            None
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }

    /// Starts a run, whose output goes to files in its folder. Also returns whether it is a copy,
    /// or copies of it can be made. `give_up` receives the age of the run.
    pub(crate) fn start(
        &self,
        trial: &Trial,
        prepared: &mut Prepared,
        give_up: impl Fn(Duration) -> bool,
    ) -> io::Result<(Started, bool)> {
        // PyTorch chooses the backend while it is imported.
        let is_special = trial
            .alloc_conf
            .as_ref()
            .is_some_and(|conf| conf.contains("backend"));
        let mut state = self.lock();
        if let State::Offered(template) = &mut *state
            && !is_special
        {
            match template.copy(prepared) {
                Ok(started) => return Ok((started, true)),
                Err(error) => {
                    *state = State::Refused(Some(format!("can no longer be copied ({error})")))
                }
            }
        }
        let early = match &*state {
            State::Wanted(early) if !is_special => early.clone(),
            _ => {
                drop(state);
                return Ok((Started::start(&mut prepared.command)?, false));
            }
        };
        let folder = prepared.folder().to_owned();
        let socket = folder.join("copies");
        fs::write(hook_folder(&folder).join("copies.py"), SCRIPT)?;
        let listener = UnixListener::bind(&socket)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
        prepared.command.env(
            COPIES,
            format!("{}:{early}:{}", process::id(), socket.display()),
        );
        let started = Started::start(&mut prepared.command)?;
        // Other runs wait for the offer.
        *state = listener
            .and_then(|listener| offer(&listener, &started, folder, give_up))
            .unwrap_or_else(|error| {
                State::Refused(Some(format!(
                    "cannot be copied ({error}: a shorter TMPDIR may help)"
                )))
            });
        let is_offered = matches!(*state, State::Offered(_));
        Ok((started, is_offered))
    }

    /// Keeps the folder of a run if the template comes from it.
    pub(crate) fn keep(&self, ended: EndedProgram) {
        if let State::Offered(template) = &mut *self.lock()
            && template.origin == ended.folder()
        {
            template.kept = Some(ended);
        }
    }
}

/// Waits until the program offers copies, refuses to, or ends.
fn offer(
    listener: &UnixListener,
    started: &Started,
    origin: PathBuf,
    give_up: impl Fn(Duration) -> bool,
) -> io::Result<State> {
    let channel = loop {
        match listener.accept() {
            Ok((channel, _)) => break channel,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if started.has_ended() || give_up(started.age()) {
            return Ok(State::Refused(Some(
                "ends before it uses the GPU".to_owned(),
            )));
        }
        thread::sleep(Duration::from_millis(5));
    };
    channel.set_nonblocking(false)?;
    channel.set_read_timeout(Some(PATIENCE))?;
    let mut channel = BufReader::new(channel);
    let reason = line(&mut channel)?;
    if !reason.is_empty() {
        return Ok(State::Refused(Some(reason)));
    }
    let process = adopted(&mut channel)?;
    Ok(State::Offered(Template {
        channel,
        _process: process,
        origin,
        kept: None,
    }))
}

impl Template {
    /// Requests a copy for a run.
    fn copy(&mut self, prepared: &Prepared) -> io::Result<Started> {
        let folder = prepared.folder();
        let variable = |(name, value): (&std::ffi::OsStr, Option<&std::ffi::OsStr>)| {
            Some([name, value?].join("=".as_ref()))
        };
        let outputs = OUTPUTS
            .map(|output| folder.join(output).into_os_string())
            .into_iter();
        let fields: Vec<OsString> = outputs
            .chain(prepared.command.get_envs().filter_map(variable))
            .collect();
        let request = fields.join("\0".as_ref());
        let bytes = request.as_bytes();
        self.channel
            .get_mut()
            .write_all(&[format!("{}\n", bytes.len()).as_bytes(), bytes].concat())?;
        let started = adopted(&mut self.channel)?;
        // The dynamic linker loaded our library into the template.
        let _ = fs::remove_file(folder.join(UNLOADED));
        Ok(started)
    }
}

/// Reads the process ID of a new child of this process.
fn adopted(channel: &mut BufReader<UnixStream>) -> io::Result<Started> {
    let pid = line(channel)?
        .parse()
        .map_err(|_| io::ErrorKind::UnexpectedEof)?;
    Ok(Started::adopted(pid))
}

fn line(channel: &mut BufReader<UnixStream>) -> io::Result<String> {
    let mut line = Vec::new();
    channel.read_until(b'\n', &mut line)?;
    Ok(OsString::from_vec(line)
        .to_string_lossy()
        .trim_end()
        .to_owned())
}
