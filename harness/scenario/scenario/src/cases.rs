use harness_language::error::Problem;
use harness_language::located::{Located, Tree};

use crate::checker::Checker;

/// The key for all allocators that are not named.
pub(crate) const OTHERS: &str = "others";
pub(crate) const SIMULATED: &str = "simulated";
pub(crate) const GPU: &str = "gpu";

harness_allocator::named_enum! {
    DeviceKind {
        Simulated = SIMULATED,
        /// A GPU, or a stand-in that is driven in the same way.
        Gpu = GPU,
    }
}

/// A value that may differ between devices and between allocators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cases<T> {
    /// The same everywhere.
    Always(T),
    /// By name of the allocator, in the order of the file. `others` exists unless all allocators
    /// are named.
    Arms {
        arms: Vec<(String, T)>,
        others: Option<T>,
    },
    Devices {
        simulated: Box<Self>,
        gpu: Box<Self>,
    },
}

type Value<'a, T> = &'a mut dyn FnMut(&Located<Tree>, &mut Checker<'_>) -> Result<T, Problem>;

impl<T> Cases<T> {
    /// The value for an allocator on a kind of device; `None` for an allocator that the scenario
    /// does not list.
    pub fn of(&self, arm: &str, device: DeviceKind) -> Option<&T> {
        match self {
            Self::Always(value) => Some(value),
            Self::Arms { arms, others } => arms
                .iter()
                .find(|(name, _)| name == arm)
                .map(|(_, value)| value)
                .or(others.as_ref()),
            Self::Devices { simulated, gpu } => match device {
                DeviceKind::Simulated => simulated.of(arm, device),
                DeviceKind::Gpu => gpu.of(arm, device),
            },
        }
    }

    pub fn values(&self) -> Vec<(Option<&str>, &T)> {
        match self {
            Self::Always(value) => vec![(None, value)],
            Self::Arms { arms, others } => {
                let named = arms
                    .iter()
                    .map(|(name, value)| (Some(name.as_str()), value));
                named
                    .chain(others.iter().map(|value| (Some(OTHERS), value)))
                    .collect()
            }
            Self::Devices { simulated, gpu } => [simulated.values(), gpu.values()].concat(),
        }
    }

    pub(crate) fn check(
        given: &Located<Tree>,
        checker: &mut Checker<'_>,
        is_value: fn(&Tree) -> bool,
        value: Value<'_, T>,
    ) -> Result<Self, Problem> {
        let Tree::Map(entries) = &given.value else {
            return Ok(Self::Always(value(given, checker)?));
        };
        if is_value(&given.value) || entries.is_empty() {
            return Ok(Self::Always(value(given, checker)?));
        }
        if let Some((first, _)) = entries
            .iter()
            .find(|(key, _)| [SIMULATED, GPU].contains(&key.value.as_str()))
        {
            return Self::check_devices(first, entries, checker, is_value, value);
        }
        Self::check_arms(given, entries, checker, value)
    }

    fn check_devices(
        first: &Located<String>,
        entries: &[(Located<String>, Located<Tree>)],
        checker: &mut Checker<'_>,
        is_value: fn(&Tree) -> bool,
        value: Value<'_, T>,
    ) -> Result<Self, Problem> {
        let help = format!("as in `{{ {SIMULATED}: …, {GPU}: … }}`; `any` expects nothing");
        if let Some((other, _)) = entries
            .iter()
            .find(|(key, _)| ![SIMULATED, GPU].contains(&key.value.as_str()))
        {
            let message = format!(
                "`{}` is next to `{}`, which is a kind of device",
                other.value, first.value
            );
            return Err(Problem::new(other.at, message)
                .help("move the allocators into the map of each kind of device"));
        }
        let mut of = |name: &str| match entries.iter().find(|(key, _)| key.value == name) {
            Some((_, given)) => Self::check(given, checker, is_value, value).map(Box::new),
            None => Err(Problem::new(first.at, format!("`{name}` is missing")).help(help.clone())),
        };
        Ok(Self::Devices {
            simulated: of(SIMULATED)?,
            gpu: of(GPU)?,
        })
    }

    fn check_arms(
        given: &Located<Tree>,
        entries: &[(Located<String>, Located<Tree>)],
        checker: &mut Checker<'_>,
        value: Value<'_, T>,
    ) -> Result<Self, Problem> {
        let (mut arms, mut others) = (Vec::new(), None);
        for (key, tree) in entries {
            if key.value == OTHERS {
                others = Some((key, value(tree, checker)?));
            } else {
                arms.push((checker.arm(key)?, value(tree, checker)?));
            }
        }
        let unnamed: Vec<String> = checker
            .arms()
            .into_iter()
            .filter(|arm| !arms.iter().any(|(name, _)| name == arm))
            .collect();
        match (&others, unnamed.is_empty()) {
            (None, false) => Err(Problem::new(
                given.at,
                format!("missing allocators: `{}`", unnamed.join("`, `")),
            )
            .help(format!(
                "name every allocator, or add a value for the rest, as in `{OTHERS}: any`"
            ))),
            (Some((key, _)), true) => Err(Problem::new(key.at, "every allocator is already named")
                .help(format!("remove `{OTHERS}`"))),
            _ => Ok(Self::Arms {
                arms,
                others: others.map(|(_, value)| value),
            }),
        }
    }
}

/// Reasons that hold everywhere, for some allocators, or on one kind of device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reasons(Vec<(Scope, String)>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Scope {
    Always,
    Arm(String),
    Device(DeviceKind),
}

impl Reasons {
    pub fn of(&self, arm: &str, device: DeviceKind) -> Option<&str> {
        let holds = |scope: &Scope| match scope {
            Scope::Always => true,
            Scope::Arm(name) => name == arm,
            Scope::Device(kind) => *kind == device,
        };
        self.0
            .iter()
            .find(|(scope, _)| holds(scope))
            .map(|(_, reason)| reason.as_str())
    }

    pub(crate) fn check(
        given: &Located<Tree>,
        what: &str,
        arm: impl Fn(&Located<String>) -> Result<String, Problem>,
    ) -> Result<Self, Problem> {
        let help = format!(
            "as in `{what}: needs a newer driver`, or for some allocators `{what}: {{ direct: too \
             slow, gpu: not tested yet }}`"
        );
        let reason =
            |tree: &Located<Tree>| match tree.text().filter(|text| !text.value.trim().is_empty()) {
                Some(text) => Ok(text.value.trim().to_owned()),
                None => {
                    Err(Problem::new(tree.at, format!("`{what}` needs a reason"))
                        .help(help.clone()))
                }
            };
        let Tree::Map(entries) = &given.value else {
            return Ok(Self(vec![(Scope::Always, reason(given)?)]));
        };
        let scope = |key: &Located<String>| match key.value.as_str() {
            SIMULATED => Ok(Scope::Device(DeviceKind::Simulated)),
            GPU => Ok(Scope::Device(DeviceKind::Gpu)),
            _ => arm(key).map(Scope::Arm),
        };
        if entries.is_empty() {
            return Err(Problem::new(given.at, format!("`{what}` needs a reason")).help(help));
        }
        entries
            .iter()
            .map(|(key, tree)| Ok((scope(key)?, reason(tree)?)))
            .collect::<Result<_, _>>()
            .map(Self)
    }
}
